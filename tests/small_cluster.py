"""A cluster of one machine that answers as Slurm does, as far as sweeps ask: what Slurm's commands do in its place.

Each job is a folder of `CLUSTER`: `state` ("PD", "R"; no file: not in the queue), `pid` of the process that srun
started, `cancelled` and `requeue` where that was asked. In `CLUSTER` itself, a file `drained` lets no job start, `away`
lets squeue fail, `refused` is what sbatch says instead of taking a job, and `over` ends everything.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

CLUSTER = Path(__file__).parent / "cluster"


def main() -> int:
    command, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    return {
        "sbatch": sbatch,
        "srun": srun,
        "squeue": squeue,
        "scancel": scancel,
        "scontrol": scontrol,
    }[command](arguments)


def sbatch(arguments):
    """Queues the jobs of a script, and leaves a process behind that starts them."""
    (script,) = arguments
    text = Path(script).read_text()
    refused = CLUSTER / "refused"
    if refused.exists():
        print(refused.read_text(), file=sys.stderr)
        return 1
    number = 1 + len(list(CLUSTER.glob("*.sh")))
    (CLUSTER / f"{number}.sh").write_text(text)
    array = re.search(r"--array=0-(\d+)%(\d+)", text)
    last, together = map(int, array.groups()) if array else (0, 1)
    for task in range(last + 1):
        job = CLUSTER / (f"{number}_{task}" if array else str(number))
        job.mkdir()
        (job / "state").write_text("PD")
    print(f"Submitted batch job {number}", flush=True)
    if os.fork() == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silent, stream)
        control(number, together)
        os._exit(0)
    return 0


def control(number, together):
    """Starts the jobs of a number as there is room, until none is left."""
    jobs = sorted(path.parent for path in CLUSTER.glob(f"{number}*/state") if path.parent.is_dir())
    running = {}
    while (jobs or running) and not (CLUSTER / "over").exists():
        for job in [job for job, process in running.items() if process.poll() is not None]:
            del running[job]
            if (job / "requeue").exists():
                (job / "requeue").unlink()
                (job / "state").write_text("PD")
                jobs.append(job)
            else:
                (job / "state").unlink()
        while jobs and len(running) < together and not (CLUSTER / "drained").exists():
            job = jobs.pop(0)
            if (job / "cancelled").exists():
                continue
            (job / "state").write_text("R")
            (job / "starts").open("a").write("x")
            main_id, _, task = job.name.partition("_")
            environ = os.environ | {"SLURM_JOB_ID": main_id, "CLUSTER_JOB": str(job)}
            if task:
                environ |= {"SLURM_ARRAY_JOB_ID": main_id, "SLURM_ARRAY_TASK_ID": task}
            running[job] = subprocess.Popen(["bash", str(CLUSTER / f"{main_id}.sh")], env=environ)
        time.sleep(0.05)
    for job, process in running.items():
        process.kill()
        with contextlib.suppress(OSError):  # it had not begun, or is gone
            os.kill(int((job / "pid").read_text()), signal.SIGKILL)
    (CLUSTER / f"{number}.sh.ended").touch()


def srun(arguments):
    """Becomes the program, with its output where submitit wants it."""
    job = Path(os.environ["CLUSTER_JOB"])
    while arguments[0].startswith("--"):
        flag = arguments.pop(0)
        if flag == "--output":
            main_id, _, task = job.name.partition("_")
            log = arguments.pop(0).replace("%A", main_id).replace("%j", main_id)
            file = os.open(
                log.replace("%a", task).replace("%t", "0"), os.O_CREAT | os.O_APPEND | os.O_WRONLY
            )
            os.dup2(file, 1)
            os.dup2(file, 2)
    (job / "pid").write_text(str(os.getpid()))
    os.execvp(arguments[0], arguments)


def squeue(arguments):
    """The jobs in the queue: number and state."""
    assert "--array" in arguments and "--format=%i %t" in arguments
    if (CLUSTER / "away").exists():
        print("slurm_load_jobs error: Unable to contact slurm controller", file=sys.stderr)
        return 1
    for state in sorted(CLUSTER.glob("*/state")):
        print(state.parent.name, state.read_text())
    return 0


def scancel(arguments):
    """Takes a job out of the queue, or tells it to stop."""
    (job,) = (CLUSTER / name for name in arguments)
    (job / "cancelled").touch()
    state = job / "state"
    if not state.exists():
        print("scancel: error: Invalid job id specified", file=sys.stderr)
        return 1
    if state.read_text() == "PD":
        state.unlink()
    else:
        os.kill(int((job / "pid").read_text()), signal.SIGTERM)
    return 0


def scontrol(arguments):
    """Stops a running job, which goes back into the queue."""
    asked, name = arguments
    assert asked == "requeue"
    (CLUSTER / name / "requeue").touch()
    os.kill(int((CLUSTER / name / "pid").read_text()), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit(main())
