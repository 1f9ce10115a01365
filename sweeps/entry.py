"""`python sweep.py …`: Hydra composes, the dataclasses check, `conduct` does the work, errors become one sentence."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ..train.errors import UserError
from . import config as schemas
from .config import SweepConfig, register
from .slurm.commands import ask

CONFIG = Path(__file__).resolve().parent.parent / "conf"


def sweep_main(arguments: list[str] | None = None) -> int:
    """Runs a sweep from Hydra overrides: 0 done, 1 a run failed, 2 the input was wrong, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: _compose_and_conduct(given))


def _compose_and_conduct(arguments: list[str]) -> int:
    import hydra

    register()
    # Hydra then raises instead of printing a traceback of its own, and `guarded` says it in a sentence.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    chosen = with_cluster(arguments)
    codes: list[int] = []
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIG), config_name="config")
    def task(config: object) -> None:
        from .execute.conduct import conduct

        try:
            codes.append(conduct(to_sweep_config(config), command=["python", "sweep.py", *arguments]))
        except Exception as error:
            failures.append(error)  # raised below: Hydra would print the overrides around it

    before = sys.argv
    sys.argv = [before[0], *chosen]
    try:
        task()
    finally:
        sys.argv = before
    if failures:
        raise failures[0]
    return max(codes, default=0)


def compose(overrides: list[str]) -> SweepConfig:
    """The configuration of `python sweep.py OVERRIDES`, for commands that need only a part of it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
        return _checked(hydra_compose("config", overrides=[*with_cluster(overrides), "sweep=none"]))


def with_cluster(arguments: list[str]) -> list[str]:
    """Replaces `cluster=auto`, which is also the default, by what answers here: slurm or local."""
    given = [argument for argument in arguments if argument.startswith("cluster=")]
    if given and given[-1] != "cluster=auto":
        return arguments
    kept = [argument for argument in arguments if argument != "cluster=auto"]
    # An installed client without a controller that replies does not count.
    on_slurm = shutil.which("sbatch") is not None and ask("sinfo", "-h", timeout=5.0).returncode == 0
    return [*kept, f"cluster={'slurm' if on_slurm else 'local'}"]


def to_sweep_config(config: object) -> SweepConfig:
    """Hydra's config as the dataclasses, with a grid."""
    result = _checked(config)
    if result.grid is None:
        grids = ", ".join(sorted(path.stem for path in (CONFIG / "grid").glob("*.yaml")))
        raise UserError(f"grid is missing; add +grid=NAME with one of {grids}")
    return result


def _checked(config: object) -> SweepConfig:
    """As the dataclasses: every interpolation resolved, every type checked."""
    from omegaconf import OmegaConf

    result = OmegaConf.to_object(config)
    assert isinstance(result, SweepConfig)
    return result


def guarded(work: Callable[[], int]) -> int:
    """Runs a command and turns what a user can cause into one sentence and an exit code."""
    try:
        return work()
    except UserError as error:
        return _say(str(error), 2)
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
            return _say(str(error), 2)
        if isinstance(error, OSError):
            return _say(f"{error.strerror or error}: {error.filename or 'no file named'}", 1)
        raise


def composition_error(error: Exception) -> str:
    """One sentence from Hydra's several lines."""
    text = f"{error}\n{error.__cause__ or ''}"
    lines = list(dict.fromkeys(line.strip().rstrip(".") for line in text.splitlines() if line.strip()))
    if "Config search path:" in lines:
        lines = lines[: lines.index("Config search path:")]
    noise = ("full_key:", "object_type=", "reference_type=", "Set the environment", "Either remove", "Or add")
    sentence = ", ".join(line for line in lines if not line.startswith(noise)).replace(":,", ":")
    match = re.search(r"Key '\w+' (?:is )?not in '(\w+)'", sentence)
    if match and (node := getattr(schemas, match[1], None)):
        sentence = sentence.split(", To append")[0]
        sentence += f", which has {', '.join(item.name for item in dataclasses.fields(node))}"
    return sentence


def _say(message: str, code: int) -> int:
    print(f"error: {message}" if code != 130 else message, file=sys.stderr)
    return code
