# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for torchtitan: configs that build what they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar


class Configurable:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            assert self._owner is not None
            return self._owner(config=dataclasses.replace(self), **kwargs)

        def traverse(
            self, config_cls: type, *, recurse: bool = False, _prefix: str = ""
        ) -> Iterator[tuple[str, Any, Any, Any]]:
            for field in dataclasses.fields(self):
                child = getattr(self, field.name)
                name = f"{_prefix}.{field.name}".strip(".")
                if isinstance(child, config_cls):
                    yield name, child, self, field.name
                elif isinstance(child, Configurable.Config):
                    yield from child.traverse(config_cls, recurse=recurse, _prefix=name)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config: Any = cls.__dict__.get("Config")
        if config is not None:
            assert "__slots__" in config.__dict__
            assert all(field.kw_only for field in dataclasses.fields(config) if field.init)
            config._owner = cls
