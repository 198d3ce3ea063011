# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/checkpoints.md from those of `moeos.checkpoints`.

`python -m tests.docs.checkpoints_page`, in a checkout, writes them; what stands between them is
written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeos.checkpoints.stored_matrices import FORMATS
from moeos.config.hf.families import FAMILIES, Family
from moeos.config.hf.layouts import LAYOUTS, Layout
from tests.processes import ROOT

PAGE = ROOT / "docs" / "checkpoints.md"
_BEGIN, _END = "<!-- table: {} -->\n", "<!-- end -->\n"


def page(text: str) -> str:
    """The page with the tables of today; else as it is."""
    for name, table in TABLES.items():
        begin = _BEGIN.format(name)
        head, _, rest = text.partition(begin)
        text = head + begin + table() + _END + rest.partition(_END)[2]
    return text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def families() -> str:
    """A row a family."""
    heads = ("Models", "`model_type`", "`family`", "Stored as", "Routing", "Activation")
    rows = [
        (
            family.said,
            _code(family.model_types),
            f"`{name}`",
            "; ".join(dict.fromkeys(row.name for row in family.layouts)),
            _routing(family),
            _activation(family),
            _shared(family),
            "; ".join(_works(field, values) for field, values in family.works.items()) or "-",
        )
        for name, family in FAMILIES.items()
    ]
    return _table((*heads, "Shared experts", "Fields that must be"), rows)


def _shared(family: Family) -> str:
    shared = family.shared
    if shared is None:
        return "none"
    modules = [row.second.partition(".")[0] + "." for row in shared.layouts]
    said = _code(family.shared_names or modules) + ": "
    if shared.count is not None:
        said += f"`{shared.count.names[0]}` times "
    said += f"`{shared.width.names[0]}`"
    if any(row.beside for row in shared.layouts):
        said += ", beside the block"
    if family.latent is not None:
        said += f"; with `{family.latent}` the caller's, as they read what the router reads"
    return said


def _works(field: str, values: Sequence[object]) -> str:
    return f"`{field}` " + (" or ".join(f"`{value!r}`" for value in values) or "absent")


def _read(family: Family, field: str) -> str:
    return f"`{family.reads[field].names[0]}`"


def _routing(family: Family) -> str:
    if family.routing == "caller":
        return "the caller's"
    rules, reads = family.rules, family.reads
    said = [_read(family, "scoring") if "scoring" in reads else rules.get("scoring", "softmax")]
    if rules.get("router_dtype"):
        said.append("router in float32")
    if rules.get("router_bias"):
        said.append("a bias on logits")
    if rules.get("selection_bias"):
        said.append("a bias of the selection")
    if "expert_groups" in reads:
        best = "best" if rules.get("group_score") == "max" else "two best"
        said.append(f"{_read(family, 'expert_groups')} groups by their {best}")
    renormalize = rules.get("renormalize", reads.get("renormalize", True))
    if renormalize is True:
        said.append("renormalised")
    elif renormalize is False:
        said.append("not renormalised")
    else:
        said.append(f"renormalised by {_read(family, 'renormalize')}")
    if "routed_scaling" in reads:
        said.append(f"times {_read(family, 'routed_scaling')}")
    if rules.get("apply_router_weight_on_input"):
        said.append("the weight multiplies x")
    if rules.get("expert_scale"):
        said.append("a scale an expert")
    if "zero_experts" in reads:
        said.append(f"{_read(family, 'zero_experts')} experts that return x")
    if family.hashed_in is not None:
        said.append("or ids from the caller")
    if family.latent is not None:
        said.append(f"or, with `{family.latent}`, the caller's")
    return ", ".join(said)


def _activation(family: Family) -> str:
    names = sorted(set(family.activations.values())) or [family.rules["activation"]]
    said = " or ".join(names)
    if "swiglu_limit" in family.reads:
        said += f", limited by {_read(family, 'swiglu_limit')}"
    return said


def layouts() -> str:
    """A row a layout."""
    heads = ("Layout", "Router", "Experts", "Matrices", "Formats")
    rows = [
        (row.name, _router(row), _code(row.matrices), _matrices(row), ", ".join(row.formats))
        for row in LAYOUTS
    ]
    return _table(heads, [*dict.fromkeys(rows)])


def _router(row: Layout) -> str:
    return _code([name for name in (row.router, row.router_bias, row.expert_scale) if name])


def _matrices(row: Layout) -> str:
    said = ["[inputs, outputs]" if row.transposed else "[outputs, inputs]"]
    if row.interleaved:
        said.append("gate and up rows take turns")
    elif row.gated:
        said.append("gate rows, then up rows" if len(row.first) == 1 else "gate and up apart")
    else:
        said.append("no gate")
    if row.zero_experts_padded:
        said.append(
            "rows for zero experts, too" if row.stacked else "those of zero experts are read past"
        )
    return ", ".join(said)


def formats() -> str:
    """A row a format."""
    heads = ("Format", "What it is", "Parts", "Read past", "As it is shipped, `weight_format`")
    rows = [
        (
            row.name,
            row.said,
            _code(row.parts),
            _code(row.unused) or "nothing",
            " or ".join(f"`{name!r}`" for name in row.held_as) or "none",
        )
        for row in FORMATS
    ]
    return _table(heads, rows)


TABLES: dict[str, Callable[[], str]] = {
    "families": families,
    "layouts": layouts,
    "formats": formats,
}

if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
