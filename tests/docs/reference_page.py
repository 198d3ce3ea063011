# SPDX-License-Identifier: Apache-2.0
"""Writes docs/api.md, the reference of what `moeos` offers, from signatures and docstrings.

`python -m tests.docs.reference_page`, in a checkout, writes the page. It knows nothing of what the
names do: what the page says of them stands in the package.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ForwardRef

import torch

import moeos
from moeos.engines.base import CallStats
from moeos.world.tracing import RankTrace
from tests.processes import ROOT

PAGE = ROOT / "docs" / "api.md"

HEAD = (
    "What `import moeos` offers, name by name. [architecture.md](architecture.md) explains how it "
    "works, [sizing.md](sizing.md) how to choose `max_tokens` and a capacity. This page is written "
    "by `python -m tests.docs.reference_page` from the package's signatures and docstrings.",
    "Letters: P ranks, S tokens of a rank in a call, k experts of a token, H hidden, "
    "I intermediate, E experts in all, X experts of one rank; a *pair* is one (token, j) "
    "with j < k. `moeos.__version__` is the installed version, a string.",
)
"""The paragraphs that begin the page."""

NOT_FOR_CALLERS = {
    "moeos.layer.experts.Experts.agreed": "a MoELayer makes its own",
    "moeos.layer.layer.MoELayer.set_matrix": "what a layer draws, and quantize makes",
    "moeos.layer.experts.CallKind": "how a MoELayer calls its experts",
    "moeos.layer.experts.Experts.place": "MoELayer.replace has moved the weights",
    "moeos.layer.experts.Experts.settle": "MoELayer.replace waits",
    "moeos.layer.experts.Experts.run": "a MoELayer calls its experts",
    "moeos.layer.experts.Experts.own_rows": "calls return them",
    "moeos.world.faults.LayerFaults": "what an engine makes of a plan",
    "moeos.world.faults.plan_of": "how init and virtual.run find a world's plan",
    "moeos.world.faults.FaultPlan.check_ranks": "init and virtual.run check their plan",
    "moeos.world.faults.StartDelay.draw": "LayerFaults draws",
    "moeos.layer.layer.MoELayer.extra_repr": "torch.nn.Module prints with it",
    "moeos.partition.placement.Placement.digest": "ranks compare it",
    "moeos.partition.placement.Placement.require_fits": "ranks check it when they make a layer",
    "moeos.partition.placement.Placement.table": "an engine gives it to the runtime",
    "moeos.config.reference.activate": "adapters compare other libraries' activations with it",
    "moeos.world.world.TwinOptions.processors_for": "a World divides its host's cores",
    "moeos.world.world.World.allocate_heap": "an engine's memory",
    "moeos.world.world.World.note_workspace": "a Workspace is numbered",
    "moeos.world.world.World.release": "a closed Workspace gives its memory back",
    "moeos.world.world.World.interrupt": "virtual.run ends its ranks with it",
    "moeos.world.world.World.number_layer": "an engine asks which faults are its own",
    "moeos.world.world.World.require_open": "engines check it",
    "moeos.world.world.World.require_trace": "engines check it",
}
"""What has no underscore because other files of the package use it, and which of them do; it is
not on the page."""

_WIDTH = 130  # characters of a line of prose
_CODE_WIDTH = 100
_INDENT = " " * 4
_NAMES = re.compile(r"[A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*(?=[: ])")
_NO_BREAK = "\0"
_BLOCK_START = re.compile(r" (?=(?:[-+*=#>]+|\d+[.)]) )")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A class or a function of the page, and the name by which a caller reaches it."""

    name: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Subject:
    """A section of the page.

    Attributes:
        title: its heading.
        about: the paragraph that begins it.
        entries: what it describes.
    """

    title: str
    about: str
    entries: list[Entry]


def subjects() -> list[Subject]:
    """The sections, in the page's order."""
    return [
        Subject(
            "Make a world",
            "Every process calls `init` once; what it returns goes into each layer.",
            _exported("init", "World", "Workspace", "TwinOptions"),
        ),
        Subject(
            "The layer",
            "`MoELayer` is a `torch.nn.Module`: call it as `layer(x, ...)`, with the arguments of "
            "`forward`. `Experts` are what it computes with, for a model that has weights and a "
            "router of its own. `Placement` says which ranks hold which experts. `quantize` makes "
            "a layer whose weights take less memory.",
            [
                *_exported("MoELayer", "Experts", "Placement", "quantize"),
                Entry("CallStats", CallStats),
            ],
        ),
        Subject(
            "Its config",
            "What a layer is; also the top-level keys of the TOML files in `configs/`.",
            _exported("MoEConfig"),
        ),
        Subject(
            "Training",
            "What a trainer needs beside a layer, in plain PyTorch. [training.md](training.md) "
            "puts it together.",
            [*_exported("topk"), *public_of(moeos.training)],
        ),
        Subject(
            "Checkpoints",
            "What `MoELayer.from_hf` reads with. [checkpoints.md](checkpoints.md) lists what it "
            "understands.",
            public_of(moeos.checkpoints),
        ),
        Subject(
            "Errors",
            "Every other bad argument raises `ValueError` or `TypeError`.",
            _exported("ConfigMismatch", "NumericalError", "PeerTimeout"),
        ),
        Subject(
            "Virtual ranks",
            "Several ranks as threads of one process, for tests; results are those of one process "
            "a rank.",
            public_of(moeos.world.virtual),
        ),
        Subject(
            "The reference",
            "The layer in float64 and plain PyTorch, without ranks: it sees the tokens of one rank "
            "and the weights of all experts. It runs on the device of its arguments and can be "
            "differentiated.",
            public_of(moeos.config.reference),
        ),
        Subject(
            "Faults",
            "What ranks of a running world do wrong, and at which of their calls: a `FaultPlan` "
            "is given to `init` or `virtual.run`, or lies in the TOML file that the environment "
            'variable MOEOS_FAULTS names ([failure.md](failure.md), "Faults on demand").',
            public_of(moeos.world.faults),
        ),
        Subject(
            "Traces",
            "What `MoELayer.trace` returns. `OS_ACTORS` and `EVENT` are in `moeos.world.tracing`; "
            "[tracing.md](tracing.md) reads a trace.",
            [Entry("RankTrace", RankTrace)],
        ),
    ]


def page() -> str:
    """The whole page."""
    found = subjects()
    contents = (
        _listed(f"{subject.title}: {', '.join(_link(entry.name) for entry in subject.entries)}")
        for subject in found
    )
    head = "\n".join(["# The API\n", *map(_wrapped, HEAD)])
    return "".join([head, "\n", *contents, *map(_section, found)])


def public_of(module: ModuleType) -> list[Entry]:
    """The classes and functions that a module defines for callers, or lists, in its order."""
    return [
        Entry(f"{module.__name__.rpartition('.')[2]}.{name}", value)
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module.__name__ or name in getattr(module, "__all__", ()))
        and _for_callers(value, name)
    ]


def members(kind: type) -> list[tuple[str, Any]]:
    """The methods and properties that a class itself has for callers, as they stand in it."""
    return [
        (name, value)
        for name, value in vars(kind).items()
        if (inspect.isfunction(value) or isinstance(value, (classmethod, property)))
        and _for_callers(_function(value), name)
    ]


def _for_callers(value: Any, name: str) -> bool:
    return (name == "__call__" or not name.startswith("_")) and full_name(
        value
    ) not in NOT_FOR_CALLERS


def full_name(value: Any) -> str:
    """Where a class or a function is defined."""
    return f"{value.__module__}.{value.__qualname__}"


def _function(member: Any) -> Any:
    """What a class's member runs."""
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, classmethod) else member


def _exported(*names: str) -> list[Entry]:
    return [Entry(name, getattr(moeos, name)) for name in names]


def _docstring(value: Any) -> str:
    """Raises `ValueError` if there is none of its own: a dataclass generates one, its signature."""
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if not own or (inspect.isclass(value) and own.startswith(f"{value.__name__}(")):
        raise ValueError(f"{full_name(value)} has no docstring")
    return inspect.cleandoc(own)


def _section(subject: Subject) -> str:
    return f"\n## {subject.title}\n\n{_wrapped(subject.about)}" + "".join(
        map(_described, subject.entries)
    )


def _described(entry: Entry) -> str:
    """A function, or a class with its members."""
    text = _with_heading("###", entry.name, entry.value)
    if not inspect.isclass(entry.value):
        return text
    own = members(entry.value)
    properties = "".join(
        _listed_property(name, value.fget) for name, value in own if isinstance(value, property)
    )
    if properties:
        text += f"\nProperties:\n\n{properties}"
    return text + "".join(
        _with_heading("####", f"{entry.value.__name__}.{name}", getattr(entry.value, name))
        for name, value in own
        if not isinstance(value, property)
    )


def _with_heading(level: str, name: str, value: Any) -> str:
    code = f"```python\n{_signature(name, value)}\n```"
    return f"\n{level} {name}\n\n{code}\n\n{markdown(_docstring(value))}"


def _listed_property(name: str, getter: Any) -> str:
    """A list item, whose further paragraphs are indented."""
    returned = _type(inspect.signature(getter).return_annotation)
    first, *others = _docstring(getter).split("\n\n")
    rest = textwrap.indent("".join(f"\n{markdown(other)}" for other in others), "  ")
    return _listed(f"`{name}: {returned}`: {first}") + rest


def _signature(name: str, value: Any) -> str:
    """How something is called; of an error, what it is."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return f"class {name}({bases})"
    return _call(name, value)


def _call(name: str, value: Any) -> str:
    """How something is called, on one line or with one for each argument."""
    signature = inspect.signature(value)
    words, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            words.append("*")
            keyword_only = True
        words.append(_parameter(parameter))
    returns = "" if inspect.isclass(value) else f" -> {_type(signature.return_annotation)}"
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) <= _CODE_WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {_type(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    return f"{text} = {_value(parameter.default)}"


def _type(annotation: object) -> str:
    """An annotation as its source has it, where strings stand in double quotes."""
    if isinstance(annotation, ForwardRef):  # of a NamedTuple
        annotation = annotation.__forward_arg__
    assert isinstance(annotation, str), annotation
    return annotation.replace("'", '"')


def _value(default: object) -> str:
    """A default; of a dataclass only what differs from its own defaults."""
    if isinstance(default, str):
        return json.dumps(default)
    if dataclasses.is_dataclass(default):
        set_ = (
            f"{field.name}={_value(getattr(default, field.name))}"
            for field in dataclasses.fields(default)
            if getattr(default, field.name) != field.default
        )
        return f"{type(default).__name__}({', '.join(set_)})"
    assert default is None or isinstance(default, (bool, int, float, tuple, torch.dtype))
    return repr(default)


def markdown(docstring: str) -> str:
    """A docstring in Markdown: below a line that ends with a colon, what is indented is a list, or
    of `Returns:` a paragraph; behind a blank line it is code.
    """
    blocks: list[str] = []
    lines = docstring.splitlines()
    while lines:
        if not lines[0]:
            del lines[0]
        elif lines[0].startswith(_INDENT):
            code = "\n".join(one.removeprefix(_INDENT) for one in _take_paragraph(lines))
            blocks.append(f"```python\n{code}\n```\n")
        elif _begins_section(lines):
            header, items = lines.pop(0), _take_items(lines)
            if header == "Returns:":
                blocks.append(_wrapped(f"Returns: {' '.join(items)}"))
            else:
                blocks.append(f"{_wrapped(header)}\n{''.join(map(_listed_entry, items))}")
        else:
            blocks.append(_wrapped(" ".join(_take_paragraph(lines))))
    return "\n".join(blocks)


def _begins_section(lines: Sequence[str]) -> bool:
    return lines[0].endswith(":") and len(lines) > 1 and lines[1].startswith(_INDENT)


def _take_paragraph(lines: list[str]) -> list[str]:
    """Removes the lines up to a blank one or a section."""
    taken = [lines.pop(0)]
    while lines and lines[0] and not _begins_section(lines):
        taken.append(lines.pop(0))
    return taken


def _take_items(lines: list[str]) -> list[str]:
    """Removes the indented lines; an item goes on in lines that are indented deeper."""
    items: list[str] = []
    while lines and lines[0].startswith(_INDENT):
        line = lines.pop(0).removeprefix(_INDENT)
        if line.startswith(_INDENT):
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    return items


def _listed_entry(item: str) -> str:
    """An item of a section: the names that it begins with are code."""
    names = _NAMES.match(item)
    if names is None:
        return _listed(item)
    coded = ", ".join(f"`{name}`" for name in names.group().split(", "))
    return _listed(f"{coded}{item[names.end() :]}")


def _listed(text: str) -> str:
    return _wrapped(text, "* ", "  ")


def _wrapped(text: str, first: str = "", others: str = "") -> str:
    """A paragraph in lines of which none begins like a list item or a heading by accident."""
    lines = textwrap.wrap(
        _BLOCK_START.sub(_NO_BREAK, text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_NO_BREAK, " ") + "\n"


def _link(name: str) -> str:
    """To the heading of an entry, as GitHub names it."""
    return f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
