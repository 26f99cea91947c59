"""Write the keys, as the schema declares them, where people read them: ``just keys`` writes the
values of ``configs/*.yaml`` and the tables of docs/configuration.md and docs/built-in-trainer.md.

What stands around them in these files is left as it is.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from omegaconf import MISSING

from robust_train.config.keys import Group, Key, group_of, schema
from robust_train.config.schema import TrainerConfig, TrainingConfig
from robust_train.config.values import AUTO, Declaration
from robust_train.vision import keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/configuration.md"
PAGE_OF_OURS = "docs/built-in-trainer.md"
WIDTH = 100

YAML = {
    "configs/robust_base.yaml": schema().plain,
    "configs/robust.yaml": schema().root,
    "configs/robust/model/cnn.yaml": group_of(keys.CnnConfig),
    "configs/robust/model/linear_probe.yaml": group_of(keys.LinearProbeConfig),
    "configs/robust/model/lora.yaml": group_of(keys.LoraModelConfig),
    "configs/robust/model/full_finetune.yaml": group_of(keys.FullFinetuneConfig),
    "configs/robust/dataset/image_folder.yaml": group_of(keys.ImageFolderConfig),
}
MODELS = {"": keys.BackboneConfig, **keys.MODELS}
GROUPS = {
    "Models": ("model", MODELS),
    "Data sets": ("dataset", {"": keys.DatasetConfig, "image_folder": keys.ImageFolderConfig}),
    "Trainers": ("trainer", {"": TrainerConfig}),
}
"""Sections of the pages about groups that differ by the chosen option, and their classes."""

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "list"}


@dataclasses.dataclass(frozen=True)
class Declared:
    """A key of the schema, and the section of the page where it stands."""

    section: str
    name: str  # with its group
    key: Declaration
    type: object
    default: object  # as it is written

    @property
    def shown_default(self) -> str:
        """The default, and what it does not show of the accepted values, for people."""
        default = f"`{self.key.follows or _text(self.default)}`"
        others = [f"`{_text(choice)}`" for choice in self.key.choices]
        unsaid = [choice for choice in others if choice != default and choice not in self.meaning]
        if self.key.choices:
            return " or ".join((default, *unsaid))
        if self.default == MISSING:
            return f"— ({self.type_name})"
        if self.default is None or self.default == AUTO or self.key.follows:
            return f"{default} or {self.key.unit or self.type_name}"
        return f"{default} {self.key.unit}".rstrip()

    @property
    def type_name(self) -> str:
        """The type, for people."""
        is_union = isinstance(self.type, types.UnionType)
        kind = typing.get_args(self.type)[0] if is_union else self.type
        return self.key.accepts or _NAMES[typing.get_origin(kind) or kind]

    @property
    def meaning(self) -> str:
        more = self.key.more
        stop = "" if not more or more.startswith("(") else "."
        return f"{self.key.meaning}{stop} {more}".rstrip()

    def row(self, meaning: str) -> str:
        return f"| `{self.name}` | {self.shown_default} | {meaning} |"

    @property
    def yaml(self) -> list[str]:
        """The lines of a YAML file."""
        name, value = self.name.rpartition(".")[2], _text(self.default)
        if self.key.follows:
            value = f"${{oc.select:{self.key.follows},{value}}}"
        line = f"{json.dumps(name) if name == 'on' else name}: {value}"
        note = re.sub(r"\[([^]]+)\]\([^)]+\)|`", r"\1", self.key.meaning)
        if len(line) + len(note) + 3 > WIDTH:
            return [f"# {note}", line]
        return [f"{line} # {note}"]


def _text(value: object) -> str:
    if isinstance(value, float):
        exponent = f"{value:.1e}"
        return exponent.replace("e-0", "e-") if 0 < value < 0.01 else f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def declared(group: Group, prefix: str = "", section: str = "") -> Iterator[Declared]:
    for name, member in group.members.items():
        if isinstance(member, Key):
            section = member.about.section or section
            default = member.item.default if member.about.written is ... else member.about.written
            kind = typing.get_type_hints(member.owner)[name]
            yield Declared(section, prefix + name, member.about, kind, default)
        elif not member.is_open:
            section = member.section or section
            yield from declared(member, f"{prefix}{name}.", section)


def rows_of_the_page() -> dict[str, list[str]]:
    """Return the rows of each section's table on the page of the launcher's keys."""
    rows: dict[str, list[str]] = {}
    for declared_key in declared(schema().root):
        rows.setdefault(declared_key.section, []).append(declared_key.row(declared_key.meaning))
    return rows | _rows_of_groups("Trainers")


def rows_of_the_built_in_trainer() -> dict[str, list[str]]:
    """Return the rows of each section's table on the page of the built-in trainer."""
    shared = {declared_key.name for declared_key in declared(group_of(TrainingConfig), "training.")}
    training = declared(group_of(keys.ImageTrainingConfig), "training.")
    rows = [
        declared_key.row(declared_key.meaning)
        for declared_key in training
        if declared_key.name not in shared
    ]
    return {"Training": rows} | _rows_of_groups("Models", "Data sets")


def _rows_of_groups(*sections: str) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for section in sections:
        group, options = GROUPS[section]
        seen: dict[str, list[tuple[str, Declared]]] = {}
        for option, cls in options.items():
            for declared_key in declared(group_of(cls), f"{group}."):
                seen.setdefault(declared_key.name, []).append((option, declared_key))
        rows[section] = [_merged(options) for options in seen.values()]
    return rows


def _merged(options: list[tuple[str, Declared]]) -> str:
    """Return one row for a key that several options of a group have."""
    first, merged = options[0]
    is_lone = first and len(options) == 1
    if len({_text(other.default) for _, other in options}) > 1:
        merged = dataclasses.replace(merged, default=MISSING)
    return merged.row(f"`{first}`: {merged.meaning}" if is_lone else merged.meaning)


def page(text: str, tables: dict[str, list[str]]) -> str:
    """Return a page with its tables written anew."""
    for section, rows in tables.items():
        table = ["| key | default | meaning |", "|---|---|---|", *rows]
        pattern = rf"(?ms)(^## {section}\n.*?)^\|.*?(?=^[^|]|\Z)"
        text, replaced = re.subn(
            pattern, lambda m, t=table: m[1] + "\n".join(t) + "\n", text, count=1
        )
        assert replaced, f"no table under '## {section}'"
    return text


def yaml(text: str, root: Group) -> str:
    """Return a YAML file with its values written anew; its head and Hydra's part stay."""
    head = text[: text.index("  - _self_\n") + len("  - _self_\n")]
    tail = text[text.index("\nhydra:\n") :] if "\nhydra:\n" in text else ""
    names = set(root.members)
    if root is schema().root:
        names -= set(schema().plain.members)
    lines: list[str] = []
    before, group = "", ""
    for declared_key in declared(root):
        top, _, name = declared_key.name.partition(".")
        if top not in names:
            continue
        is_new_group = bool(name) and top != group
        if root is schema().root and declared_key.section != before:
            lines += ["", f"# {declared_key.section}"]
        elif root is schema().plain and is_new_group:
            lines.append("")
        if is_new_group:
            lines.append(f"{top}:")
        lines += [("  " if name else "") + line for line in declared_key.yaml]
        before, group = declared_key.section, top
    return head + "\n" + "\n".join(lines).lstrip("\n") + "\n" + tail


def written() -> dict[str, str]:
    """Return the files as they have to be, by path."""
    tables = {PAGE: rows_of_the_page(), PAGE_OF_OURS: rows_of_the_built_in_trainer()}
    files = {path: page((ROOT / path).read_text(), rows) for path, rows in tables.items()}
    for path, root in YAML.items():
        files[path] = yaml((ROOT / path).read_text(), root)
    return files


if __name__ == "__main__":
    for path, text in written().items():
        (ROOT / path).write_text(text)
