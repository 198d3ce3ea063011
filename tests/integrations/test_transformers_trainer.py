# SPDX-License-Identifier: Apache-2.0
"""`transformers.Trainer` trains a model whose experts are moeos' as it does with its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.processes import torchrun

RANKS = 2

PROGRAM = """
import json, sys
import torch
from transformers import Trainer, TrainingArguments
import moeos.integrations.transformers as adapter
from tests.integrations.test_transformers import VOCABULARY, tiny

torch.set_num_threads(1)
adapter.register(max_tokens=64)
generator = torch.Generator().manual_seed(3)
tokens = torch.randint(VOCABULARY, (32, 12), generator=generator)
data = [{"input_ids": row, "labels": row} for row in tokens]
losses = {}
for implementation in ("eager", "moeos"):
    model = tiny("qwen3_moe", num_hidden_layers=2).requires_grad_().train()
    model.set_experts_implementation(implementation)
    arguments = TrainingArguments(
        sys.argv[1],
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    assert arguments.world_size == 2
    losses[implementation] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    norms = [one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one]
    losses[implementation + " norms"] = norms
print(f"[losses {json.dumps(losses)}]", flush=True)
"""


@pytest.mark.timeout(300)
def test_ranks_with_data_of_their_own_have_the_losses_of_eager_experts(tmp_path: Path) -> None:
    ended = torchrun(RANKS, PROGRAM, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    # Ranks share stdout: what one of them prints may follow the other's on the same line.
    every = [json.loads(found) for found in re.findall(r"\[losses (\{.*?\})\]", ended.stdout)]
    assert len(every) >= 1, ended.stdout
    for losses in every:
        assert len(losses["moeos"]) == 6
        assert losses["moeos"] == pytest.approx(losses["eager"], rel=1e-3)
        assert losses["moeos norms"] == pytest.approx(losses["eager norms"], rel=1e-3)
        assert losses["moeos"][-1] < losses["moeos"][0]
