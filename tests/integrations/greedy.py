# SPDX-License-Identifier: Apache-2.0
"""A program: the tokens that vLLM chooses greedily for three prompts.

greedy.py MODEL OPTIONS, where OPTIONS is a JSON object of arguments for vLLM's LLM. Runs in vLLM's
environment.
"""

import json
import sys

MARK = "GREEDY "


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_batched_tokens=128,
        max_num_seqs=4,
        **({"dtype": "float32"} | json.loads(sys.argv[2])),
    )
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 17, 9)]
    chosen = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, detokenize=False))
    print(MARK + json.dumps([list(one.outputs[0].token_ids) for one in chosen]))


if __name__ == "__main__":
    main()
