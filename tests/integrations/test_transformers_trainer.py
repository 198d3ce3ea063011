# SPDX-License-Identifier: Apache-2.0
"""`transformers.Trainer` trains a model whose experts are moeos' as it does with its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integrations.test_transformers import PARALLEL, tiny
from tests.processes import forked

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


SHARED = """
import json, sys
import torch
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
import moeos.integrations.transformers as adapter
from tests.integrations.test_transformers import PARALLEL, VOCABULARY, experts_modules, tiny

folder = sys.argv[1]
torch.set_num_threads(1)
adapter.register(max_tokens=64)
generator = torch.Generator().manual_seed(3)
tokens = torch.randint(VOCABULARY, (32, 12), generator=generator)
data = [{"input_ids": row, "labels": row} for row in tokens]
cls = type(tiny("qwen3_moe"))
losses = {}
for implementation in ("auto", "moeos"):
    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
    model = cls.from_pretrained(folder + "/model", distributed_config=config)
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model.requires_grad_().train(), arguments, train_dataset=data)
    trainer.train()
    ready = [hasattr(module, adapter._READY) for module in experts_modules(model)]
    assert ready == [implementation == "moeos"] * 2
    for name in ("loss", "grad_norm"):
        found = [one[name] for one in trainer.state.log_history if name in one]
        losses[f"{implementation} {name}"] = found
print(f"[losses {json.dumps(losses)}]", flush=True)
"""


@pytest.mark.timeout(300)
def test_ranks_that_share_the_experts_have_the_losses_and_norms_of_transformers(
    tmp_path: Path,
) -> None:
    """Gradients are clipped by the norm over all ranks, as Trainer takes it. With tp_size it
    refuses CPUs."""
    tiny("qwen3_moe", num_hidden_layers=2, **PARALLEL).save_pretrained(tmp_path / "model")
    ended = forked(RANKS, SHARED, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    every = [json.loads(found) for found in re.findall(r"\[losses (\{.*?\})\]", ended.stdout)]
    assert len(every) >= 1, ended.stdout
    for losses in every:
        assert len(losses["moeos loss"]) == 4
        assert min(losses["moeos grad_norm"]) > 0.5  # all steps are clipped
        for name in ("loss", "grad_norm"):
            assert losses[f"moeos {name}"] == pytest.approx(losses[f"auto {name}"], rel=1e-3)


@pytest.mark.timeout(300)
def test_ranks_with_data_of_their_own_have_the_losses_of_eager_experts(tmp_path: Path) -> None:
    ended = forked(RANKS, PROGRAM, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    # Ranks share stdout: what one of them prints may follow the other's on the same line.
    every = [json.loads(found) for found in re.findall(r"\[losses (\{.*?\})\]", ended.stdout)]
    assert len(every) >= 1, ended.stdout
    for losses in every:
        assert len(losses["moeos"]) == 6
        assert losses["moeos"] == pytest.approx(losses["eager"], rel=1e-3)
        assert losses["moeos norms"] == pytest.approx(losses["eager norms"], rel=1e-3)
        assert losses["moeos"][-1] < losses["moeos"][0]
