"""`python sweep.py …`: Hydra composes, the dataclasses check, `conduct` does the work, errors become one sentence."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..train import config as fields_of_runs
from ..train.config import flatten
from ..train.errors import UserError
from . import config as schemas
from .config import REMOVED, TUNED, SweepConfig, base_run, register
from .manual import manual
from .slurm.commands import ask
from .terminal import printable

CONFIG = Path(__file__).resolve().parent.parent / "conf"
MOST_SAID = 1200  # characters of a message
LONGEST = 120  # characters of a folder's name, beyond which a hash stands for the rest
PLAIN = re.compile(r"""^([^=]+)=([^][{}()"'\\,$]+)$""")  # a value that means the same between quotes
OVERRIDE = re.compile(r"""(?<=[\[,])\s*([\w.+~/@-]+=[^][{}"',]*)(?=[],])""")  # of a variant, in a list


def sweep_main(arguments: list[str] | None = None) -> int:
    """Runs a sweep from Hydra overrides: 0 done, 1 a run failed, 2 the input was wrong, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: compose_and_conduct(given))


def compose_and_conduct(arguments: list[str]) -> int:
    """`sweep_main` without its sentences: errors are raised."""
    import hydra

    if {"-h", "--help"} & {*arguments}:
        print(manual(CONFIG, arguments))
        return 0
    register()
    # Hydra then raises instead of printing a traceback of its own, and `guarded` says it in a sentence.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    chosen = for_hydra(arguments)
    codes: list[int] = []
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIG), config_name="config")
    def task(config: object) -> None:
        from hydra.core.hydra_config import HydraConfig

        from .execute.conduct import conduct

        try:
            wanted = to_sweep_config(config)
            resolve_variants(wanted, list(HydraConfig.get().overrides.task))
            wanted.sweep = job_folder(wanted.sweep, chosen)
            codes.append(conduct(wanted, command=["python", "sweep.py", *arguments]))
        except Exception as error:
            failures.append(error)  # raised below: Hydra would print the overrides around it

    before = sys.argv
    # argparse takes overrides together only, so flags and what follows them come last.
    sys.argv = [before[0], *sorted(chosen, key=lambda one: one[:1] == "-" or ("=" not in one and one[:1] != "~"))]
    try:
        task()
    except Exception as error:  # of the composition, for what fails in a task is kept
        raise UserError(composition_error(error)) from error
    finally:
        sys.argv = before
    if failures:
        raise failures[0]
    return max(codes, default=0)


def job_folder(sweep: str | None, arguments: list[str]) -> str | None:
    """A sweep's folder: of a job of --multirun its own, named by the overrides that tell the jobs apart."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    if sweep is None or HydraConfig.get().mode != RunMode.MULTIRUN:
        return sweep
    given = [argument for argument in arguments if not argument.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(given)
    varied = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    pairs = (override.partition("=")[::2] for override in HydraConfig.get().overrides.task)
    # The folder's name may be the grid's, or vary itself.
    parts = [f"{key.lstrip('+')}={value}" for key, value in pairs if key in varied and value != sweep]
    name = "_".join([sweep, *(re.sub(r"[^\w.=,+-]+", "-", re.sub(r"[][{}()'\"]", "", part)) for part in parts)])
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def compose(overrides: list[str]) -> SweepConfig:
    """The configuration of `python sweep.py OVERRIDES`, for commands that need only a part of it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
        result = _checked(hydra_compose("config", overrides=[*for_hydra(overrides), "sweep=none"]))
        resolve_variants(result, for_hydra(overrides))
        return result


def for_hydra(arguments: list[str]) -> list[str]:
    """Quotes values with letters beyond ASCII and variants' overrides; keeps rules off the fields that are given;
    replaces `cluster=auto`, also the default, by slurm or local.
    """
    for name in (argument.partition("=")[0].lstrip("+~") for argument in arguments):
        if name in REMOVED:
            raise UserError(f"{name} is no field any more: {REMOVED[name]}")
    arguments = [argument if argument.isascii() else PLAIN.sub(r'\1="\2"', argument) for argument in arguments]
    arguments = [OVERRIDE.sub(r'"\1"', one) if one.startswith("grid.variants=") else one for one in arguments]
    if "--hydra-help" in arguments:
        return arguments
    named = [name for argument in arguments if (name := argument.partition("=")[0].lstrip("+")) in TUNED]
    if named and not any(argument.startswith("tuning.keep=") for argument in arguments):
        arguments = [f"tuning.keep=[{','.join(named)}]", *arguments]  # in front, for a flag may take what follows it
    given = [argument for argument in arguments if argument.startswith("cluster=")]
    if given and given[-1] != "cluster=auto":
        return arguments
    kept = [argument for argument in arguments if argument != "cluster=auto"]
    # An installed client without a controller that replies does not count.
    on_slurm = shutil.which("sbatch") is not None and ask("sinfo", "-h", timeout=5.0).returncode == 0
    return [f"cluster={'slurm' if on_slurm else 'local'}", *kept]


def to_sweep_config(config: object) -> SweepConfig:
    """Hydra's config as the dataclasses, with a grid."""
    result = _checked(config)
    if result.grid is None:
        grids = ", ".join(sorted(path.stem for path in (CONFIG / "grid").glob("*.yaml")))
        raise UserError(f"grid is missing; add +grid=NAME with one of {grids}")
    return result


def resolve_variants(config: SweepConfig, overrides: list[str]) -> None:
    """Replaces the overrides of grid.variants by the fields of a run that they change, as Hydra composes them."""
    from hydra import compose as hydra_compose

    own, found = flatten(dataclasses.asdict(base_run(config))), getattr(config.grid, "variants", None)
    variants = found if isinstance(found, dict) else {}
    for name, given in variants.items():
        if isinstance(given, list) and all(isinstance(one, str) for one in given):
            asked = [one for one in overrides if "grid.variants" not in one.partition("=")[0]]
            other = _checked(hydra_compose("config", overrides=[*asked, "grid.variants=null", "sweep=none", *given]))
            fields = flatten(dataclasses.asdict(base_run(other)))
            variants[name] = {field: value for field, value in fields.items() if value != own.get(field, fields)}


def _checked(config: object) -> SweepConfig:
    """As the dataclasses: every interpolation resolved, every type checked."""
    from omegaconf import OmegaConf

    result = OmegaConf.to_object(config)
    assert isinstance(result, SweepConfig)
    return result


def guarded(work: Callable[[], int]) -> int:
    """Runs a command and turns what a user can cause into one sentence and an exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return work()
    except UserError as error:
        return _say(error, 2)
    except BrokenPipeError:
        return 0  # the reader of a pipe, such as head, has seen enough
    except KeyboardInterrupt:
        return _say("interrupted; everything finished so far is kept, and the same command goes on from here", 130)
    except Exception as error:
        # Some of Hydra's errors are OSErrors too; its modules take a while to import, so they are known by name.
        if type(error).__module__.split(".")[0] in ("hydra", "omegaconf"):
            return _say(composition_error(error), 2)
        from ..fit.errors import InputError

        if isinstance(error, InputError):
            return _say(error, 2)
        if isinstance(error, OSError):
            return _say(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1)
        raise


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Our own as a note, without the line of code that made it."""
    if category is UserWarning and Path(filename).resolve().is_relative_to(CONFIG.resolve().parent):
        print(f"note: {message}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def composition_error(error: Exception) -> str:
    """One sentence from Hydra's several lines."""
    if override := getattr(error, "override", None):
        return (
            f"{override!r} cannot be read as FIELD=VALUE; a value with signs other than letters, digits and - _ . / "
            "needs double quotes within the shell's single ones, as in 'data.path=\"a(b)\"'"
        )
    text = f"{error}\n{error.__cause__ or ''}".partition("Config search path:")[0]
    lines = list(dict.fromkeys(line.strip().rstrip(".") for line in text.splitlines() if line.strip()))
    if missing := re.search(r"Could not find '(\w+)/([^']*)'\s+Available options in '\w+':([\s\w]*)", text):
        group, name, options = missing.groups()
        kinds = [option for option in options.split() if not option.endswith("_schema")]
        return f"{group} is {name!r}{_meant(name, kinds)}; it must be one of {', '.join(kinds)}"
    unknown = re.search(r"Could not override '([\w.]+)'.*Key '(\w+)' (?:is )?not in '(\w+)'", text, re.DOTALL)
    if unknown and (node := getattr(schemas, unknown[3], None) or getattr(fields_of_runs, unknown[3], None)):
        fields, where = [item.name for item in dataclasses.fields(node)], unknown[1].rpartition(".")[0]
        return f"{unknown[1]} is no field{_meant(unknown[2], fields)}; {where or 'a sweep'} has {', '.join(fields)}"
    noise = ("full_key:", "object_type=", "reference_type=", "Set the environment", "Either remove", "Or add")
    sentence = ": ".join(line for line in lines if not line.startswith(noise)).removeprefix("Error merging override ")
    return re.sub(r"field '[\w.]+' is not Optional", "it cannot be null", sentence)


def _meant(name: str, known: Sequence[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _say(message: object, code: int) -> int:
    text = re.sub(r"\b(is|contains) None\b", r"\1 null", printable(str(message)))  # as an override would write it
    if len(text) > MOST_SAID:  # a value in it has no end
        text = f"{text[: MOST_SAID // 2]} … {text[-MOST_SAID // 2 :]}"
    print(f"error: {text}" if code != 130 else text, file=sys.stderr)
    return code
