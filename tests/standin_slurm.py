"""Stand-ins for SLURM's commands: shell scripts on the PATH that keep a queue in a folder and start no job."""

from __future__ import annotations

import re
from pathlib import Path

# Files in the folder: `queue` has one line `id comment` per job or array task, `running` one id per line, `reasons` why
# jobs wait, and `ended` the answer of sacct for jobs that have left the queue.
SBATCH = r"""
kind=$(sed -n 's/^#SBATCH --job-name=.*-\([a-z]*\)$/\1/p' "$1")
if [ -f refuse-$kind ]; then cat refuse-$kind >&2; exit 1; fi
last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\).*/\1/p' "$1")
count=$((${last:-0} + 1))
if [ -f limit ] && [ $(($(wc -l <queue) + count)) -gt $(cat limit) ]; then
  echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1
fi
id=$(cat next); echo $((id + 1)) >next
cp "$1" job-$id
comment=$(sed -n "s/^#SBATCH --comment=//p" "$1")
if [ -n "$last" ]; then seq 0 $last | sed "s/.*/${id}_& $comment/" >>queue; else echo "$id $comment" >>queue; fi
if [ -f lose ]; then rm lose; echo "sbatch: error: Unable to contact slurm controller" >&2; exit 1; fi
echo "Submitted batch job $id"
"""
SQUEUE = r"""
while read -r id comment; do
  state=PENDING; reason=Priority
  if grep -qx "$id" running; then state=RUNNING; reason=None; fi
  if grep -q "^#SBATCH --hold" "job-${id%_*}" 2>/dev/null; then reason=JobHeldUser; fi
  if grep -q "^$id " reasons; then reason=$(sed -n "s/^$id //p" reasons); fi
  echo "$id|$state|$reason|$comment"
done <queue
"""
SCANCEL = r"""for id; do grep -v "^$id[_ ]" queue >left || true; mv left queue; done"""
SCONTROL = r"""
case "$1" in
  release) echo "$2" | tr , '\n' >>released;;
  show) case "$2" in
    config) if [ -f clock ]; then echo "Configuration data as of $(cat clock)"; fi
      echo "MaxArraySize            = $(cat max_array)";;
    hostnames) echo "$3" | tr , '\n';;
  esac;;
esac
"""
SINFO = r"""tr ' ' '\n' <nodes"""


class StandIn:
    """The queue of the stand-ins and the requests they received."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        scripts = {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL, "scontrol": SCONTROL, "sinfo": SINFO}
        scripts |= {"sacct": "cat ended"}
        for name, script in {**scripts, "srun": "", "sacctmgr": "exit 1"}.items():
            path = folder / "bin" / name
            # The path that sbatch receives must be absolute, because the script changes the folder.
            path.write_text(f"#!/bin/sh\nset -e\ncd {folder}\n{script}\n")
            path.chmod(0o755)
        empty = dict.fromkeys(("queue", "released", "running", "reasons", "ended"), "")
        for name, content in {**empty, "next": "100\n", "max_array": "1001\n", "nodes": "a b"}.items():
            self.say(name, content)

    def say(self, name: str, content: str) -> None:
        """Set a stand-in's answer: clock, limit, max_array, nodes, running, reasons, ended, refuse-KIND or lose."""
        (self.folder / name).write_text(content)

    def queue(self) -> list[str]:
        """Return the ids of the jobs in the queue."""
        return [line.split()[0] for line in (self.folder / "queue").read_text().splitlines()]

    def released(self) -> set[str]:
        """Return the jobs and arrays that have been released."""
        return set((self.folder / "released").read_text().split())

    def end(self, *jobs: str) -> None:
        """Remove jobs or tasks from the queue."""
        lines = (self.folder / "queue").read_text().splitlines(keepends=True)
        ended_lines = {line for line in lines if line.split()[0] in jobs or line.split("_")[0] in jobs}
        self.say("queue", "".join(line for line in lines if line not in ended_lines))

    def is_ours(self, job: str) -> bool:
        """Return whether sbatch submitted this job; tests put jobs of other users into the queue directly."""
        return (self.folder / f"job-{job}").exists()

    def script(self, job: str) -> str:
        return (self.folder / f"job-{job.split('_')[0]}").read_text()

    def flags(self, job: str) -> dict[str, str]:
        """Return the #SBATCH options of a job or its array."""
        options = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", self.script(job), re.MULTILINE)
        return {name: value.strip("'") for name, value in options}

    def of_kind(self, kind: str) -> list[str]:
        """Return the queued jobs or arrays of a kind in the order of submission."""
        arrays = [job for job in dict.fromkeys(job.split("_")[0] for job in self.queue()) if self.is_ours(job)]
        return [job for job in arrays if self.flags(job)["job-name"].endswith(f"-{kind}")]

    def tasks(self, job: str) -> int:
        return sum(task.split("_")[0] == job for task in self.queue())
