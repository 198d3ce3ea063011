# SPDX-License-Identifier: Apache-2.0
"""The config of one Mixture-of-Experts layer: its sizes, activation, routing and limits.

A `MoEConfig` is checked once, when it is made; every other module may rely on what it says.
Must not depend on ranks, heaps or engines.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from moeos.config.activations import FORMULAS, Activation, Formula
from moeos.config.element_formats import (
    ACTIVATION_NAMES,
    FORMATS,
    HIDDEN_GROUP,
    NAMES,
    TOKEN_GROUP,
    ActivationFormat,
    WeightFormat,
)
from moeos.config.hf.families import FAMILIES
from moeos.config.hf.hf_config import config_from_hf
from moeos.config.limits import DTYPES, MAX_EXPERTS
from moeos.system.files import read_json, read_toml
from moeos.system.spelling import nearest, told_nearest

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
RowMap = Literal["ragged", "capacity"]
GroupScore = Literal["top2_sum", "max"]
Routing = Literal["layer", "ids", "caller"]
Clamp = Literal["before", "after"]
Rounding = Literal["NR-f", "SR-f", "NR-s", "Balance-f", "UP", "DOWN"]
Save = Literal["nothing", "preactivation"]
GateUp = Literal["concatenated", "interleaved", "separate"]


_MAX_INTEGER = 2**31 - 1  # the runtime counts in 32 bits
_MIN_NUMBER, _MAX_NUMBER = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_TILE = 128
_MAX_ROUNDED_EXPERTS, _MAX_ROUNDED_CHOICES = 4096, 32  # what moeos.topk takes
_MINIMUM_CAPACITY_FACTOR = 1e-6
_CAPACITY_DENOMINATOR = 10**6
_OF_HF = ("hf_config", "hf_layer", "hf_shared", "hf_dequantize")
_SWITCHES = (
    *("renormalize", "selection_bias", "bias"),
    *("router_bias", "expert_scale", "apply_router_weight_on_input", "shared_gate"),
    "transposed",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The shape and the rules of one Mixture-of-Experts layer.

    Integers are at most 2^31 - 1; other numbers are positive and within the range of float32.

    Attributes:
        hidden: H, elements of a token; a positive multiple of 8, and see `weight_format`.
        intermediate: I, elements between the two GEMMs of an expert; likewise.
        experts: E, routed experts over all ranks; at most `moeos.config.limits.MAX_EXPERTS`, and on
            the GPU `moeos.compile.kernel_shape.MAX_EXPERTS`.
        top_k: k, experts of a token; 1 <= k <= E + zero_experts.
        activation: "swiglu" (gated: silu(gate) * up), "gelu" (exact, with erf), "gelu_tanh",
            "silu", "relu", "identity", "swigluoai" (gated, gpt-oss and MiniMax-M3:
            gate * sigmoid(alpha * gate) * (up + 1), clamped), "geglu_tanh" (gated, Gemma-4:
            gelu_tanh(gate) * up) or "relu2" (Nemotron-H: the square of relu).
        dtype: of tokens, weights and output: torch.float32, bfloat16 or float16.
        router_dtype: torch.float32 keeps the router's weight in float32, whatever `dtype` is, and
            sums its logits so that the chosen experts are float64's wherever the margin, of logits
            or of selection scores, exceeds 1e-6 of the token's largest one in magnitude. None: the
            router is as all other weights.
        max_tokens: the most tokens that one rank may pass in one call; sizes all buffers.
        scoring: expert scores are the softmax over all logits, or the sigmoid of each, or
            "sqrtsoftplus", the square root of the softplus of each (DeepSeek-V4).
        renormalize: divide the k weights of a token by their sum (FlashDMoE, eq. 5.1 and 5.2).
        capacity_factor: None is dropless. Otherwise at least 1e-6: an expert takes at most
            `capacity(S)` pairs from the S tokens of one rank and the rest are dropped (GShard,
            arXiv:2006.16668).
        row_map: how the rows of a source are laid out on the expert's rank; "ragged" packs them,
            "capacity" gives every expert the same number of slots. None means "capacity" where a
            capacity factor is set and "ragged" where not; read `resolved_row_map`.
        routed_scaling: multiplies the weights after renormalisation (DeepSeek-V3).
        selection_bias: the layer holds an fp32 [E] bias that is added to the scores to choose the
            experts, and not to weigh them (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        expert_groups: consecutive experts form this many groups of equal size.
        top_groups: only experts of a token's best `top_groups` groups can be chosen.
        group_score: a group's score is "top2_sum", the sum of its two best selection scores or its
            only one (DeepSeek-V3), or "max", its best one (DeepSeek-V2, arXiv:2405.04434). No
            tensor of a checkpoint shows which: the config must say it.
        swiglu_limit: clamps the gate from above and up on both sides, with a gated activation:
            silu(min(gate, limit)) * clamp(up, -limit, limit). None: 7 with "swigluoai", and no
            limit with others; read `resolved_swiglu_limit`.
        swiglu_clamp: the gate is clamped "before" its curve (DeepSeek-V4, GLM-5, gpt-oss,
            MiniMax-M3), or "after" it: min(silu(gate), limit) (Step-3.7). Up is clamped alike.
        swiglu_alpha: the slope in gate * sigmoid(alpha * gate). None: 1.702 with "swigluoai", and 1
            with "swiglu"; other activations have none.
        bias: experts have biases b1 [X, w1_rows] and b2 [X, H].
        routing: who routes. "layer": the layer, unless a call has topk_ids. "ids": the caller
            chooses, and the layer's gate may weigh (experts hashed by tokens' numbers). "caller":
            the caller chooses and weighs, by a rule that is not here. With the last two a call
            without topk_ids raises.
        family: the family whose checkpoints the weights are read from, a row of
            docs/checkpoints.md; `from_hf` sets it. None: names alone decide. It is no part of what
            the layer computes, and ranks may differ in it.
        router_bias: the layer holds an fp32 bias [E], `gate.bias`, that is added to the logits
            before they are scored (gpt-oss).
        expert_scale: the layer holds an fp32 scale [E], `gate.expert_scale`, that multiplies an
            expert's weight after all other rules (Gemma-4).
        apply_router_weight_on_input: a token's weight multiplies x, and the result is not weighed
            (Llama-4); top_k is 1. Set `renormalize=False` with it, or every weight is 1.
        zero_experts: this many experts after the E real ones return x itself, times their weight
            (LongCat-Flash). They have ids from E on, and are chosen as all others are: the router's
            tensors then have E + zero_experts rows; read `router_rows`.
        shared_experts: n, MLPs that every token passes in addition to its k experts (DeepSeek-V3).
            Their sum is added to the output, and no router weighs them. They have the activation of
            the routed experts, and no biases. All ranks hold all of them.
        shared_intermediate: Is, elements between the two matrices of a shared expert; a positive
            multiple of 8 where there are shared experts, else 0.
        shared_gate: the sum of the shared experts is multiplied by the sigmoid of x . shared_gate
            (Qwen2-MoE).
        weight_format: how the routed experts' w1 and w2 are held: None, in `dtype`; or quantized,
            as codes and scales. "fp8_block128", "fp8_channel" and "fp8_tensor" are e4m3 with an
            fp32 scale for 128 x 128 weights, for a row or for a matrix; H and I are multiples of
            16. "mxfp4" is e2m1 with an e8m0 scale for 32 weights of a row, "nvfp4" e2m1 with an
            e4m3 scale for 16 and an fp32 one for a matrix, "int4_group32" integers with a bfloat16
            scale for 32; H and I are multiples of 32. Tokens, biases and the router are as without
            it, and shared experts unless `shared_weight_format` says otherwise.
        activation_format: how experts get their tokens. None: in `dtype`. "fp8_group128": quantized
            to e4m3 codes with an fp32 scale for 128 elements; rows between GEMM0 and GEMM1 have one
            for 64. Both GEMMs then multiply FP8 by FP8 and sum in fp32: W8A8, or W4A8 with weights
            of 4 bits, which are e4m3 codes exactly. It needs a `weight_format`, H a multiple of 128
            and I of 64. The router, shared and zero experts read x as it is.
        rounding: how each expert's tokens of a call become a whole number of tiles, in training
            mode: "NR-f", "SR-f", "NR-s", "Balance-f", "UP" or "DOWN", as
            `moeos.training.round_tokens` has them. None: they do not. Each rank rounds its own
            tokens. The layer then routes in PyTorch, also in eval mode, where nothing is rounded;
            and calls have `slots` experts a token. Not with a capacity, groups of experts, zero
            experts, `apply_router_weight_on_input` or a caller that routes.
        rounding_tile: tokens of a tile.
        shared_weight_format: how the shared experts' shared_w1 and shared_w2 are held: None, in
            `dtype`; or as `weight_format`, which it then is. Is is such a multiple as H and I. They
            are dequantized to `dtype` and multiplied, also with an `activation_format`.
        save: what a call that has a gradient keeps of the routed experts for its backward.
            "nothing": GEMM0 is computed again. "preactivation": x w1^T + b1 of the rows that this
            rank's experts have got, in a tensor that autograd saves.
        saved_rows: with `save="preactivation"` the most rows that a call keeps on a rank, with an
            equal share for each source; in a call in pieces, those of each piece. None: 1.25 times
            the rows that the rank gets where routing is even and all ranks pass equally many
            tokens. GEMM0 is computed again for rows beyond these.
        gate_up: how the caller's tensors hold the gate and up rows of a gated activation, in a call
            of `moeos.Experts`; I gate rows and I up rows of each expert. "concatenated": w1 has all
            gate rows, then all up rows. "interleaved": w1 has gate row 0, up row 0, gate row 1 and
            so on (gpt-oss), and so have b1 and scales that belong to rows. "separate": w1 has the
            gate rows, and w3 the up rows (torchtitan); b1 is [X, 2I] then, too, with all gate
            biases before all up biases. It excludes a `weight_format`. A `MoELayer` has
            "concatenated" alone.
        transposed: the caller's matrices have a row for each input: w1 is [X, H, 2I], with
            `gate_up` "separate" w1 and w3 are [X, H, I], and w2 is [X, I, H] (gpt-oss, Llama 4,
            Aria). Not with a `weight_format`, whose codes lie along inputs, nor in a `MoELayer`.
        result_format: how a token's results return from its experts, to be weighed and added up in
            fp32. None: in `dtype`. "fp8_group128": quantized to e4m3 codes with an fp32 scale for
            128 elements, in about half the bytes; it needs an `activation_format`. A rank quantizes
            its own results, too: outputs are the same for any number of ranks. Results of shared
            and zero experts are not sent, and stay as they are.

    Raises:
        TypeError: an argument has the wrong type (a bool is not an int).
        ValueError: an argument has a value that is not allowed, or that does not fit another's.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation = "swiglu"
    dtype: torch.dtype = torch.bfloat16
    router_dtype: torch.dtype | None = None
    max_tokens: int = 1024
    scoring: Scoring = "softmax"
    renormalize: bool = True
    capacity_factor: float | None = None
    row_map: RowMap | None = None
    routed_scaling: float = 1.0
    selection_bias: bool = False
    expert_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"
    swiglu_limit: float | None = None
    swiglu_clamp: Clamp = "before"
    swiglu_alpha: float | None = None
    bias: bool = False
    routing: Routing = "layer"
    family: str | None = None
    router_bias: bool = False
    expert_scale: bool = False
    apply_router_weight_on_input: bool = False
    zero_experts: int = 0
    shared_experts: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    weight_format: WeightFormat | None = None
    activation_format: ActivationFormat | None = None
    rounding: Rounding | None = None
    rounding_tile: int = _TILE
    shared_weight_format: WeightFormat | None = None
    save: Save = "nothing"
    saved_rows: int | None = None
    result_format: ActivationFormat | None = None
    gate_up: GateUp = "concatenated"
    transposed: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            self._check_integer(name, multiple=8)
        for name in ("experts", "top_k", "max_tokens", "expert_groups", "top_groups"):
            self._check_integer(name)
        if self.experts > MAX_EXPERTS:
            raise self._error("experts", f"at most {MAX_EXPERTS}")
        self._check_integer("zero_experts", least=0)
        if self.router_rows > MAX_EXPERTS:
            raise self._error("zero_experts", f"at most {MAX_EXPERTS - self.experts}")
        for name in _SWITCHES:
            self._check_type(name, bool)
        self._check_choice("activation", get_args(Activation))
        self._check_choice("scoring", get_args(Scoring))
        self._check_choice("group_score", get_args(GroupScore))
        self._check_choice("routing", get_args(Routing))
        if self.family is not None:
            self._check_choice("family", tuple(FAMILIES))
        self._check_choice("swiglu_clamp", get_args(Clamp))
        if self.row_map is not None:
            self._check_choice("row_map", get_args(RowMap))
        self._check_dtypes()
        self._check_positive_number("routed_scaling")
        self._check_routing()
        if self.capacity_factor is not None:
            self._check_positive_number("capacity_factor")
            if self.capacity_factor < _MINIMUM_CAPACITY_FACTOR:
                raise self._error("capacity_factor", f"at least {_MINIMUM_CAPACITY_FACTOR}")
        self._check_activation()
        self._check_shared()
        self._check_weight_format()
        self._check_activation_format()
        self._check_rounding()
        self._check_shared_weight_format()
        self._check_save()
        self._check_result_format()
        self._check_weight_layout()

    @property
    def formula(self) -> Formula:
        """What the activation computes."""
        return FORMULAS[self.activation]

    @property
    def gated(self) -> bool:
        """Whether w1 holds gate rows and up rows."""
        return self.formula.gated

    @property
    def halves(self) -> int:
        """Matrices of an expert's w1: 2, gate and up, if gated, else 1."""
        return 2 if self.gated else 1

    def in_numbers(self) -> MoEConfig:
        """This layer without formats: weights, tokens and results are in `dtype`."""
        fields = ("weight_format", "activation_format", "shared_weight_format", "result_format")
        numbers: dict[str, Any] = dict.fromkeys(fields)
        return dataclasses.replace(self, **numbers)

    @property
    def resolved_swiglu_limit(self) -> float | None:
        """The clamp in use: `swiglu_limit`, or the activation's own; None where there is none."""
        return self.formula.limit if self.swiglu_limit is None else self.swiglu_limit

    @property
    def resolved_swiglu_alpha(self) -> float:
        """The slope in use: `swiglu_alpha`, or the activation's own."""
        return self.formula.alpha if self.swiglu_alpha is None else self.swiglu_alpha

    @property
    def router_rows(self) -> int:
        """Experts that a token may choose, E + zero_experts: rows of the router's tensors."""
        return self.experts + self.zero_experts

    @property
    def slots(self) -> int:
        """Experts of a token in a call, at most: k; with `rounding` twice as many, or E."""
        return self.top_k if self.rounding is None else min(2 * self.top_k, self.experts)

    @property
    def gate_dtype(self) -> torch.dtype:
        """The dtype of the router's weight: `router_dtype`, or `dtype` if that is None."""
        return self.dtype if self.router_dtype is None else self.router_dtype

    @property
    def w1_rows(self) -> int:
        """Rows of one expert's w1: 2I (gate, then up) if gated, else I."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def shared_w1_rows(self) -> int:
        """Rows of one shared expert's w1: 2Is (gate, then up) if gated, else Is."""
        return 2 * self.shared_intermediate if self.gated else self.shared_intermediate

    @property
    def resolved_row_map(self) -> RowMap:
        """The row map in use: `row_map`, or the default that goes with `capacity_factor`."""
        if self.row_map is not None:
            return self.row_map
        return "ragged" if self.capacity_factor is None else "capacity"

    @property
    def capacity_ratio(self) -> Fraction | None:
        """Slots of an expert for each token of a source, at most 1; None when dropless.

        It is capacity_factor * k / E in exact arithmetic, for code that has only integers:
        capacity(S) = ceil(S * numerator / denominator), and the denominator is at most E * 10^6.
        The factor is taken as the nearest fraction with a denominator of at most 10^6, so that
        1.1 means 11/10 and not the binary number above it, whose ceiling may be one slot more.
        """
        if self.capacity_factor is None:
            return None
        factor = Fraction(self.capacity_factor).limit_denominator(_CAPACITY_DENOMINATOR)
        return min(Fraction(1), factor * self.top_k / self.experts)

    def capacity(self, tokens: int) -> int | None:
        """Slots of one expert for a source of `tokens` tokens: min(S, ceil(factor * S * k / E)).

        More than S slots cannot be used, since a token chooses an expert at most once. None when
        dropless. The ceiling is exact; see `capacity_ratio`.

        Raises:
            ValueError: `tokens` is negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens is {tokens}; it must be at least 0")
        ratio = self.capacity_ratio
        return None if ratio is None else math.ceil(ratio * tokens)

    def experts_per_rank(self, world_size: int) -> int:
        """X = ceil(E / P), the most experts that one of `world_size` ranks holds; see `experts_of`.

        Raises:
            ValueError: `world_size` is below 1.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be at least 1")
        return -(-self.experts // world_size)

    def experts_of(self, rank: int, world_size: int) -> range:
        """The experts that `rank` holds, by the rule of `torch.chunk` and of DTensor's `Shard(0)`.

        The first ranks hold X each, the next one what is left. The ranks after it hold none.

        Raises:
            ValueError: `world_size` is below 1, or `rank` is not 0 to `world_size` - 1.
        """
        most = self.experts_per_rank(world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be at least 0 and below {world_size}")
        first, end = (min(self.experts, most * place) for place in (rank, rank + 1))
        return range(first, end)

    def digest(self) -> str:
        """All fields but `family` as one line of JSON: equal exactly when two layers are the same.

        The row map, the limit and alpha are the resolved ones. It is what ranks send each other to
        compare; see `digest_differences`.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["dtype"] = _dtype_name(self.dtype)
        if self.router_dtype is not None:
            fields["router_dtype"] = _dtype_name(self.router_dtype)
        fields["row_map"] = self.resolved_row_map
        del fields["family"]
        fields["swiglu_limit"] = self.resolved_swiglu_limit
        fields["swiglu_alpha"] = self.resolved_swiglu_alpha
        return json.dumps(fields)

    @classmethod
    def from_hf(
        cls,
        config: object,
        layer: int | None = None,
        *,
        shared: bool = True,
        dequantize: bool = False,
        **changes: Any,
    ) -> MoEConfig:
        """The config of a Mixture-of-Experts layer of a Hugging Face model.

        docs/checkpoints.md lists the families that are supported, and their limits. Shared experts
        are part of the layer where the table says so: as one MLP, as checkpoints have them. For a
        quantized model `weight_format` is the format in which it ships the layer's experts, None if
        it does not quantize them. `shared_weight_format` equals it, or None likewise.

        Args:
            config: a transformers config, or the dict that a config.json holds; also that of a
                model of several kinds of input, of which the text model's is taken.
            layer: the number of the layer, which is then checked to have routed experts; those that
                predict further tokens follow the model's own. None: any that has; then no list of
                one number a layer can be read, and all layers must be in one format.
            shared: False: the layer has no shared experts, as the caller adds them.
            dequantize: True: `weight_format` is None, so that quantized weights of a model are
                dequantized to `dtype` when they are read.
            changes: fields to replace, such as `max_tokens` and `dtype`.

        Raises:
            TypeError: an argument has the wrong type, or a field of `changes` is none of a config.
            ValueError: the family is not known, a field has a value for which there is no rule
                here, the layer has no routed experts, or they are in several formats or in one that
                no layer holds.
        """
        return config_from_hf(cls, config, layer, shared, dequantize, changes)

    @classmethod
    def from_toml(cls, path: str | Path) -> MoEConfig:
        """Read a config from the top-level keys of a TOML file, named like the fields.

        dtype and router_dtype are written as names (`dtype = "bfloat16"`). With `hf_config`, the
        path of a Hugging Face config.json from the file's folder, and `hf_layer`, the number of one
        of its layers, these say what no other key does: see `from_hf`. `hf_shared = false` leaves
        its shared experts out, and `hf_dequantize = true` is its `dequantize`. One table, `[run]`,
        is allowed and ignored: it is for the command line.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not TOML, a key is unknown or missing, or a value is not allowed.
            TypeError: a value has the wrong type.
        """
        values = read_toml(path)
        run = values.pop("run", {})
        if not isinstance(run, dict):
            raise TypeError(f"{path}: run is {run!r}; it must be a table, [run]")
        of_hf = {key: values.pop(key) for key in _OF_HF if key in values}
        try:
            if not of_hf:
                return cls.from_table(values, others=["run", *_OF_HF])
            if not isinstance(of_hf.get("hf_config"), str):
                raise TypeError(_must_be("hf_config", of_hf.get("hf_config"), "a path"))
            config = read_json(Path(path).parent / of_hf["hf_config"])
            changes = cls._fields_of(values, ["run", *_OF_HF])
            switches = {
                "shared": _switch("hf_shared", of_hf, default=True),
                "dequantize": _switch("hf_dequantize", of_hf, default=False),
            }
            return cls.from_hf(config, of_hf.get("hf_layer"), **switches, **changes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None

    @classmethod
    def from_table(cls, values: Mapping[str, Any], others: Iterable[str] = ()) -> MoEConfig:
        """The config of a TOML table that has been read; `others` are keys next to it in the file.

        Raises `ValueError` and `TypeError` as `from_toml` does, without a file's name.
        """
        given = cls._fields_of(values, others)
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise ValueError(f"missing key {', '.join(missing)}")
        return cls(**given)

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
        """The values of a TOML table as those of fields."""
        fields = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in fields:
                raise ValueError(
                    f"unknown key {key!r}; the nearest valid one is "
                    f"{nearest(key, [*fields, *others])!r}"
                )
        names = [name for name in ("dtype", "router_dtype") if name in values]
        return {**values, **{name: _dtype_of(name, values[name]) for name in names}}

    def _check_type(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(_must_be(name, value, f"of type {kind.__name__}"))

    def _check_integer(self, name: str, multiple: int = 1, least: int = 1) -> None:
        self._check_type(name, int)
        value = getattr(self, name)
        if value < least or value % multiple != 0:
            allowed = f"at least {least}" if multiple == 1 else f"a positive multiple of {multiple}"
            raise self._error(name, allowed)
        if value > _MAX_INTEGER:
            raise self._error(name, f"at most {_MAX_INTEGER}")

    def _check_positive_number(self, name: str) -> None:
        """Check a float field and store an int as the float that it means."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(_must_be(name, value, "a number"))
        if not 0 < value < math.inf:
            raise self._error(name, "finite and greater than 0")
        if not _MIN_NUMBER <= value <= _MAX_NUMBER:
            raise self._error(name, f"{_MIN_NUMBER:.8g} to {_MAX_NUMBER:.8g}, as float32 has it")
        object.__setattr__(self, name, float(value))

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        self._check_type(name, str)
        value = getattr(self, name)
        if value not in allowed:
            raise self._error(name, _one_of(value, allowed))

    def _check_dtypes(self) -> None:
        for name in ("dtype", "router_dtype"):
            value = getattr(self, name)
            if isinstance(value, str):
                meant = DTYPES[nearest(value.removeprefix("torch."), DTYPES)]
                raise TypeError(_must_be(name, value, f"a torch.dtype, such as {meant}"))
        self._check_type("dtype", torch.dtype)
        if self.dtype not in DTYPES.values():
            raise self._error("dtype", f"one of {', '.join(map(str, DTYPES.values()))}")
        if self.router_dtype is not None:
            self._check_type("router_dtype", torch.dtype)
            if self.router_dtype != torch.float32:
                raise self._error("router_dtype", "torch.float32, or None for the layer's dtype")

    def _check_activation(self) -> None:
        if self.swiglu_limit is not None:
            self._check_positive_number("swiglu_limit")
            if not self.gated:
                raise self._error("swiglu_limit", f"None with activation {self.activation!r}")
        if self.swiglu_clamp == "after" and self.resolved_swiglu_limit is None:
            raise self._error("swiglu_clamp", "'before' where there is no swiglu_limit")
        if self.swiglu_alpha is not None:
            self._check_positive_number("swiglu_alpha")
            if not (self.gated and self.formula.curve == "swish"):
                raise self._error("swiglu_alpha", f"None with activation {self.activation!r}")

    def _check_routing(self) -> None:
        if self.top_k > self.router_rows:
            named = "experts" if self.zero_experts == 0 else "experts + zero_experts"
            raise self._error("top_k", f"at most {named}, {self.router_rows}")
        if self.zero_experts > 0 and self.expert_groups > 1:
            raise self._error("zero_experts", "0 with expert_groups: no model has both")
        if self.apply_router_weight_on_input and self.top_k > 1:
            raise self._error(
                "top_k",
                "1 with apply_router_weight_on_input: a token is multiplied by one expert's weight",
            )
        if self.apply_router_weight_on_input and self.zero_experts > 0:
            raise self._error(
                "apply_router_weight_on_input", "False with zero_experts: no model has both"
            )
        if self.experts % self.expert_groups != 0:
            raise self._error("expert_groups", f"a divisor of experts, {self.experts}")
        if self.top_groups > self.expert_groups:
            raise self._error("top_groups", f"at most expert_groups, {self.expert_groups}")
        candidates = self.top_groups * self.router_rows // self.expert_groups
        if self.top_k > candidates:
            raise self._error("top_k", f"at most {candidates}, the experts of top_groups groups")

    def _check_shared(self) -> None:
        for name in ("shared_experts", "shared_intermediate"):
            self._check_integer(name, least=0)
        width = self.shared_intermediate
        if self.shared_experts == 0:
            if width > 0:
                raise self._error("shared_intermediate", "0 where shared_experts is 0")
            if self.shared_gate:
                raise self._error("shared_gate", "False where shared_experts is 0")
            return
        if width == 0 or width % 8 != 0:
            allowed = f"a positive multiple of 8 where shared_experts is {self.shared_experts}"
            raise self._error("shared_intermediate", allowed)
        if self.shared_experts * width > _MAX_INTEGER:
            raise self._error(
                "shared_experts", f"at most {_MAX_INTEGER // width} of {width} elements each"
            )

    def _check_weight_format(self) -> None:
        if self.weight_format is None:
            return
        self._check_choice("weight_format", NAMES)
        multiple = FORMATS[self.weight_format].multiple
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % multiple != 0:
                raise self._error(
                    name, f"a multiple of {multiple} with weight_format {self.weight_format!r}"
                )

    def _check_activation_format(self) -> None:
        if self.activation_format is None:
            return
        self._check_choice("activation_format", ACTIVATION_NAMES)
        said = f"with activation_format {self.activation_format!r}"
        if self.weight_format is None:
            raise self._error(
                "weight_format", f"one of {', '.join(NAMES)} {said}, or activation_format None"
            )
        for name, multiple in (("hidden", TOKEN_GROUP), ("intermediate", HIDDEN_GROUP)):
            if getattr(self, name) % multiple != 0:
                raise self._error(name, f"a multiple of {multiple} {said}")

    def _check_rounding(self) -> None:
        self._check_integer("rounding_tile")
        if self.rounding is None:
            if self.rounding_tile != _TILE:
                raise self._error("rounding_tile", f"{_TILE} where rounding is None")
            return
        self._check_choice("rounding", get_args(Rounding))
        said = f"with rounding {self.rounding!r}"
        for name, needed in (
            ("routing", "layer"),
            ("capacity_factor", None),
            ("expert_groups", 1),
            ("zero_experts", 0),
            ("apply_router_weight_on_input", False),
        ):
            if getattr(self, name) != needed:
                raise self._error(name, f"{needed!r} {said}")
        for name, most in (("experts", _MAX_ROUNDED_EXPERTS), ("top_k", _MAX_ROUNDED_CHOICES)):
            if getattr(self, name) > most:
                raise self._error(name, f"at most {most} {said}")

    def _check_shared_weight_format(self) -> None:
        if self.shared_weight_format is None:
            return
        self._check_choice("shared_weight_format", NAMES)
        if self.shared_experts == 0:
            raise self._error("shared_weight_format", "None where shared_experts is 0")
        if self.shared_weight_format != self.weight_format:
            raise self._error(
                "shared_weight_format", f"None, or weight_format, {self.weight_format!r}"
            )
        multiple = FORMATS[self.shared_weight_format].multiple
        if self.shared_intermediate % multiple != 0:
            said = f"a multiple of {multiple} with shared_weight_format"
            raise self._error("shared_intermediate", f"{said} {self.shared_weight_format!r}")

    def _check_weight_layout(self) -> None:
        self._check_choice("gate_up", get_args(GateUp))
        if self.gate_up != "concatenated" and not self.gated:
            raise self._error("gate_up", f"'concatenated' with activation {self.activation!r}")
        if self.weight_format is None:
            return
        said = f"with weight_format {self.weight_format!r}"
        if self.transposed:
            raise self._error("transposed", f"False {said}, whose codes lie along inputs")
        if self.gate_up == "separate":
            raise self._error("gate_up", f"'concatenated' or 'interleaved' {said}")
        if self.gate_up == "interleaved" and (FORMATS[self.weight_format].rows or 1) > 1:
            raise self._error("gate_up", f"'concatenated' {said}, whose scales belong to blocks")

    def _check_save(self) -> None:
        self._check_choice("save", get_args(Save))
        if self.saved_rows is None:
            return
        self._check_integer("saved_rows", least=0)
        if self.save == "nothing":
            raise self._error("saved_rows", "None where save is 'nothing'")

    def _check_result_format(self) -> None:
        if self.result_format is None:
            return
        self._check_choice("result_format", ACTIVATION_NAMES)
        if self.activation_format is None:
            said = f"with result_format {self.result_format!r}, or result_format None"
            raise self._error("activation_format", f"one of {', '.join(ACTIVATION_NAMES)} {said}")

    def _error(self, name: str, allowed: str) -> ValueError:
        return ValueError(_must_be(name, getattr(self, name), allowed))


MoEConfig.__init__ = told_nearest("MoEConfig")(MoEConfig.__init__)  # type: ignore[method-assign]


def digest_differences(first: str, second: str) -> dict[str, tuple[object, object]]:
    """The fields in which two configs, given by their digests, are not the same layer.

    Returns:
        field name -> (first's value, second's), in the fields' order, with values as in
        `MoEConfig.digest`; empty where both are the same.
    """
    one: dict[str, object] = json.loads(first)
    two: dict[str, object] = json.loads(second)
    return {
        name: (one.get(name), two.get(name)) for name in one | two if one.get(name) != two.get(name)
    }


def _must_be(name: str, value: object, allowed: str) -> str:
    return f"{name} is {value!r}; it must be {allowed}"


def _switch(key: str, values: Mapping[str, Any], *, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise TypeError(_must_be(key, value, "of type bool"))
    return value


def _one_of(value: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    return f"one of {', '.join(names)}; the nearest valid one is {nearest(value, names)!r}"


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)


def _dtype_of(key: str, name: object) -> torch.dtype:
    if not isinstance(name, str):
        raise TypeError(_must_be(key, name, "a name such as 'bfloat16'"))
    if name not in DTYPES:
        raise ValueError(_must_be(key, name, _one_of(name, DTYPES)))
    return DTYPES[name]
