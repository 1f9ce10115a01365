"""`python sweep.py …`: compose the config with Hydra, run the sweep, and print errors as one sentence."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..train.config import flatten
from ..train.errors import UserError
from .config import REMOVED, SweepConfig, base_run, register
from .grid.tuning import TUNED
from .terminal import printable

CONFIG = Path(__file__).resolve().parent.parent / "conf"
MOST_SAID = 1200  # most characters of an error message, chosen by hand
LONGEST = 120  # characters of a folder's name; a hash replaces the rest; chosen by hand
PLAIN = re.compile(r"""^([^=]+)=([^][{}()"'\\,$]+)$""")  # a value that means the same between quotes
OVERRIDE = re.compile(r"""(?<=[\[,])\s*([\w.+~/@-]+=[^][{}"',]*)(?=[],])""")  # of a variant, in a list

WHOLE = re.compile(r"(?<=[=\[,:])\d+(\.\d+)?e\+?[01]?\d(?=[],}]|$)")  # 2e9, which an integer field refuses as a float
ADDABLE = re.compile(r"^(data\.(domains|target)[.=])")  # mappings whose keys the user chooses

ONE_TEXT = "it must be one file, folder or glob: put several sources into one folder, or give a glob such as 'corpus/*'"

HEAD = """\
python sweep.py +grid=GRID [GROUP=OPTION ...] [SETTING=VALUE ...]      (also: isoflop sweep +grid=GRID ...)

Plan a grid of small models, train and score them, fit their laws, and write a report. Run the same command again to
continue an interrupted sweep.

  python sweep.py +grid=smoke                            takes seconds; checks that everything works
  python sweep.py +grid=chinchilla dry_run=true          the plan and its cost; starts nothing
  python sweep.py +grid=ladder sweep=orthogonal optimizer=muon
  python sweep.py +grid=chinchilla data=text data.path=corpus/ cluster=slurm
  python sweep.py --config-dir mine +grid=own            your own grid, from mine/grid/own.yaml
  python sweep.py data=hf --help                         the settings of another option
"""
TAIL = """\
--cfg job prints the whole composed configuration, --multirun starts one sweep per value of a list.
"""


def sweep_main(arguments: list[str] | None = None) -> int:
    """Run a sweep from Hydra overrides. Returns 0 if done, 1 if a run failed, 2 for wrong input, 130 if interrupted."""
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: compose_and_conduct(overrides))


def compose_and_conduct(arguments: list[str]) -> int:
    """Run a sweep as `sweep_main` does, but raise errors instead of printing them."""
    flags = _parser().parse_intermixed_args(arguments)
    if flags.help:
        print(manual(flags.overrides))
        return 0
    codes, beside = list[int](), list[str]()
    if flags.config_dir is not None:
        if not Path(flags.config_dir).is_dir():
            raise UserError(f"--config-dir is {flags.config_dir}; it must be a folder like conf/")
        beside = [f'hydra.searchpath=["file://{Path(flags.config_dir).absolute()}"]']
    with _hydra():
        for overrides, varied in expanded(for_hydra(flags.overrides), flags.multirun):
            config, grid = _composed([*beside, *overrides])
            if flags.cfg:
                import yaml

                print(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False), end="")
                continue
            if config.grid is None:
                grids = ", ".join(sorted(path.stem for path in (CONFIG / "grid").glob("*.yaml")))
                raise UserError(f"grid is missing; add +grid=NAME with one of {grids}")
            config.sweep = job_folder(config.sweep or str(grid), varied)
            config.tracker.group = config.tracker.group or config.sweep
            from .execute.conduct import conduct

            codes.append(conduct(config, command=["python", "sweep.py", *arguments]))
    return max(codes, default=0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=["job"])
    return parser


def expanded(overrides: list[str], several: bool) -> list[tuple[list[str], list[str]]]:
    """Return each job's overrides, and the part of them that differs between the jobs of a --multirun.

    Raises UserError if an override has several values without --multirun (`several`).
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(overrides)
    swept = [override for override in parsed if override.is_sweep_override()]
    if swept and not several:
        advice = ONE_TEXT if swept[0].get_key_element() == "data.path" else "write a list as [a,b]"
        raise UserError(f"{swept[0].input_line} has several values; {advice}, or add --multirun to sweep each value")
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    values = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()] for override in swept
    ]
    return [([*fixed, *varied], [*varied]) for varied in itertools.product(*values)]


def job_folder(sweep: str, varied: Sequence[str]) -> str:
    """Return a folder name: `sweep`, then the overrides `varied` that differ between jobs of a --multirun."""
    # If `sweep` itself varies, the name has its value already.
    pairs = [override.lstrip("+").partition("=")[::2] for override in varied]
    parts = [f"{key}={value}" for key, value in pairs if value != sweep]
    name = "_".join([sweep, *(re.sub(r"[^\w.=,+-]+", "-", re.sub(r"[][{}()'\"]", "", part)) for part in parts)])
    if varied and len(name) > LONGEST:
        return f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def compose(overrides: list[str]) -> SweepConfig:
    """Return the configuration of `python sweep.py OVERRIDES`."""
    with _hydra():
        return _composed(for_hydra(overrides))[0]


@contextlib.contextmanager
def _hydra() -> Iterator[None]:
    """Initialise Hydra on conf/ and raise its errors as UserError."""
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    register()
    OmegaConf.register_new_resolver("benchmark", _benchmark, replace=True)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
            yield
    except Exception as error:
        # Compared by module name, because Hydra is slow to import; some of its errors are OSErrors too.
        if type(error).__module__.split(".")[0] in ("hydra", "omegaconf"):
            raise UserError(composition_error(error)) from error
        raise


def _benchmark(name: str) -> str:
    """Return the path of a benchmark's texts, downloaded if missing, for `${benchmark:NAME}` in a config."""
    from ..evaluate.tasks.staging import BENCHMARKS, stage_benchmarks

    if name not in BENCHMARKS:
        raise UserError(f"${{benchmark:{name}}} names no benchmark; it must be one of {', '.join(BENCHMARKS)}")
    return str(stage_benchmarks(progress=lambda line: print(line, file=sys.stderr), names=[name]) / f"{name}.jsonl")


def _composed(overrides: list[str]) -> tuple[SweepConfig, str | None]:
    """Return the type-checked configuration and its grid's name (None without a grid)."""
    from hydra import compose as hydra_compose
    from omegaconf import OmegaConf

    def composed(overrides: list[str]) -> tuple[SweepConfig, str | None]:
        in_full = [WHOLE.sub(lambda number: f"{Decimal(number[0]):f}", override) for override in overrides]
        try:
            config = hydra_compose("config", in_full, return_hydra_config=True)
        except ValueError as error:  # such as of model=null
            raise UserError(composition_error(error)) from error
        grid = config.hydra.runtime.choices.get("grid")
        OmegaConf.set_struct(config, False)
        del config["hydra"]
        result = OmegaConf.to_object(config)
        assert isinstance(result, SweepConfig)
        _refuse_unknown(result)
        return result, grid

    result, grid = composed(overrides)
    variants_value = getattr(result.grid, "variants", None)
    variants = variants_value if isinstance(variants_value, dict) else {}
    base_fields = flatten(dataclasses.asdict(base_run(result))) if variants else {}
    # Replace each variant's overrides by the run fields that they change.
    for name, override_list in variants.items():
        if isinstance(override_list, list) and all(isinstance(override, str) for override in override_list):
            others = [override for override in overrides if "grid.variants" not in override.partition("=")[0]]
            other, _ = composed([*others, "grid.variants=null", *override_list])
            fields = flatten(dataclasses.asdict(base_run(other)))
            variants[name] = {
                field: value for field, value in fields.items() if value != base_fields.get(field, fields)
            }
    return result, grid


def _refuse_unknown(config: Any, prefix: str = "") -> None:
    """Raise UserError for a key, at any depth, that is no field: Hydra accepts any key after a plus."""
    fields = [item.name for item in dataclasses.fields(config)]
    for name, value in vars(config).items():
        if name not in fields:
            raise UserError(_no_field(f"{prefix}{name}", fields))
        if dataclasses.is_dataclass(value):
            _refuse_unknown(value, f"{prefix}{name}.")


def for_hydra(arguments: list[str]) -> list[str]:
    """Prepare overrides for Hydra.

    Quote non-ASCII values and variants' overrides, let domains have any name, list in tuning.keep the tuned fields
    that an override sets, and replace `cluster=auto` (the default) by slurm or local.
    """
    for name in (argument.partition("=")[0].lstrip("+~") for argument in arguments):
        if name in REMOVED:
            raise UserError(f"{name} is no longer a field: {REMOVED[name][1]}")
    arguments = [argument if argument.isascii() else PLAIN.sub(r'\1="\2"', argument) for argument in arguments]
    arguments = [ADDABLE.sub(r"++\1", argument) for argument in arguments]
    arguments = [
        OVERRIDE.sub(r'"\1"', argument) if argument.startswith("grid.variants=") else argument for argument in arguments
    ]
    named = [name for argument in arguments if (name := argument.partition("=")[0].lstrip("+")) in TUNED]
    if named and not any(argument.startswith("tuning.keep=") for argument in arguments):
        arguments = [f"tuning.keep=[{','.join(named)}]", *arguments]  # in front of any flag
    clusters = [argument for argument in arguments if argument.startswith("cluster=")]
    if clusters and clusters[-1] != "cluster=auto":
        return arguments
    others = [argument for argument in arguments if argument != "cluster=auto"]
    from .slurm.commands import ask  # `isoflop --help` starts a fifth faster without it

    # An installed client is not enough: the controller must reply.
    on_slurm = shutil.which("sbatch") is not None and ask("sinfo", "-h", timeout=5.0).returncode == 0
    return [f"cluster={'slurm' if on_slurm else 'local'}", *others]


def guarded(work: Callable[[], int]) -> int:
    """Run a command and print user errors as one sentence. Returns the exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return work()
    except UserError as error:
        return _say(error, 2)
    except BrokenPipeError:
        return 0  # the reader of the pipe, such as head, has closed it
    except KeyboardInterrupt:
        return _say("interrupted; finished work is kept, and the same command continues from here", 130)
    except Exception as error:
        from ..fit.errors import InputError

        if isinstance(error, InputError):
            return _say(error, 2)
        if isinstance(error, ModuleNotFoundError) and (error.name or "isoflop").split(".")[0] != "isoflop":
            return _say(f"this command needs {error.name}, which is not installed; install all of isoflop", 1)
        if isinstance(error, OSError):
            return _say(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1)
        raise


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Show a UserWarning of this package as a note, others as usual."""
    if category is UserWarning and Path(filename).resolve().is_relative_to(CONFIG.resolve().parent):
        print(f"note: {message}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def composition_error(error: Exception) -> str:
    """Describe an error of Hydra or OmegaConf in one sentence for the user."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    if override := getattr(error, "override", None):
        return (
            f"{override!r} cannot be read as FIELD=VALUE; put a value with characters other than letters, digits and "
            "- _ . / in double quotes inside the shell's single quotes, as in 'data.path=\"a(b)\"'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        kinds = [option for option in error.options if not option.endswith("_schema")]
        return f"{group} is {name!r}{_meant(name, kinds)}; it must be one of {', '.join(kinds)}"
    causes = (error.__cause__, error.__context__)
    inner = next((cause for cause in causes if isinstance(cause, OmegaConfBaseException)), error)
    reason, field = str(inner).splitlines()[0].rstrip("."), str(getattr(inner, "full_key", None) or "")
    node, key = getattr(inner, "object_type", None), str(getattr(inner, "key", None))
    if dataclasses.is_dataclass(node) and key not in (fields := [item.name for item in dataclasses.fields(node)]):
        return _no_field(field, fields)
    if field == "data.path" and "'list'" in reason:
        return f"data.path is a list; {ONE_TEXT}"
    if reason.endswith("is not Optional"):
        return f"{field} cannot be null"
    return f"{field}: {reason}" if field and field not in reason else reason


def _no_field(field: str, fields: Sequence[str]) -> str:
    group, _, key = field.rpartition(".")
    return f"{field} is not a field{_meant(key, fields)}; {group or 'a sweep'} has {', '.join(fields)}"


def _meant(name: str, names: Sequence[str]) -> str:
    nearest = get_close_matches(name, names, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _say(message: object, code: int) -> int:
    text = re.sub(r"\b(is|contains) None\b", r"\1 null", printable(str(message)))  # as an override would write it
    if len(text) > MOST_SAID:  # such as a value of thousands of characters
        text = f"{text[: MOST_SAID // 2]} … {text[-MOST_SAID // 2 :]}"
    print(f"error: {text}" if code != 130 else text, file=sys.stderr)
    return code


def manual(arguments: Sequence[str]) -> str:
    """Return the text of --help, with the settings of the options that `arguments` select, such as data=hf."""
    base = (CONFIG / "config.yaml").read_text(encoding="utf-8")
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", base, re.MULTILINE))
    chosen |= {group: option for group, option in _pairs(arguments) if (CONFIG / group / f"{option}.yaml").exists()}
    groups = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in sorted(CONFIG.iterdir())}
    grids = groups.pop("grid")
    lines = [HEAD, "Grids:", *_described(grids), "", "Groups (the chosen option comes first):"]
    for group, options in groups.items():
        if group in chosen:
            others = [option for option in options if option != chosen[group]]
            lines.append(f"  {group:<10} {', '.join([chosen[group], *others])}")
    settings = re.sub(r"^(#.*|defaults:\n(  .*\n)+)", "", base, flags=re.MULTILINE).strip()
    lines += ["", "Settings:", textwrap.indent(settings, "  ")]
    for group, option in chosen.items():
        text = (CONFIG / group / f"{option}.yaml").read_text(encoding="utf-8").rstrip()
        text = re.sub(r"^(# @package.*\n|defaults:\n(  .*\n)+)", "", f"{text}\n", flags=re.MULTILINE).rstrip()
        lines += ["", f"  {group}:    # {group}={option}", textwrap.indent(text, "    ")]
    return "\n".join([*lines, "", TAIL])


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for argument in arguments:
        group, _, option = argument.lstrip("+").partition("=")
        yield group, option


def _described(grids: Sequence[str]) -> Iterator[str]:
    """Yield a help line per grid: its name and the first sentence of its YAML file."""
    for grid in grids:
        text = (CONFIG / "grid" / f"{grid}.yaml").read_text(encoding="utf-8")
        comment = re.sub(r"\s*\n# ?", " ", "\n".join(re.findall(r"^# (?!@package).*$", text, re.MULTILINE)))
        first = re.match(r"#? ?(.*?[.])(?= |$)", comment)
        about = (first[1] if first else comment).strip("# ")
        yield textwrap.fill(about, 118, initial_indent=f"  {grid:<12} ", subsequent_indent=" " * 15)
