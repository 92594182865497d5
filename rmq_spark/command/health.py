"""`rmq check` and `rmq repair`: what of a store is damaged, and what can be done about it."""

from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import console, print_json, progress, say, show
from rmq_spark.command.words import reading, writing

UNHEALTHY = 3
_STEP = ("action", "what", "path", "messagesLost", "isDoneByRepair")


@click.command(short_help="Read every file: what is damaged, and what would be lost?")
@reading
def check(path: str, commit_log_path: str | None, as_json: bool) -> int:
    """Read every file of the store at PATH and say what is damaged. Exit status 0 only if nothing is, else 3.

    Nothing is changed. It may run beside a broker or a writer.
    """
    with progress("checking") as note:
        report = rmq_spark.check(path, commit_log_path=commit_log_path, progress=note)
    if as_json:
        print_json(report.to_table().to_pylist())
    else:
        console().print(str(report), markup=False)
    return 0 if report.is_healthy else UNHEALTHY


@click.command(short_help="Make a store whole again; asks before anything is changed.")
@writing
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask. Messages are given up only with --accept-loss.")
@click.option("--accept-loss", is_flag=True, help="Give messages up that cannot be kept. How many is said before.")
@click.option("--cut-log", is_flag=True, help="Let the log end before damage in its middle: all behind it is lost.")
def repair(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    as_json: bool,
    dry_run: bool,
    yes: bool,
    accept_loss: bool,
    cut_log: bool,
) -> int:
    """Check the store at PATH, say what can be done about what is found, ask, and do it.

    Exit status 3 if something is left that is not healthy, or nothing was done.
    """
    with progress("checking") as note:
        plan = rmq_spark.plan_repair(path, commit_log_path=commit_log_path, cut_log=cut_log, progress=note)
    if dry_run or plan.is_empty:
        show(_steps(plan), _STEP, as_json=as_json, nothing="Nothing is to be done: the store is healthy.")
        return 0 if plan.is_empty else UNHEALTHY
    if not as_json:
        show(_steps(plan), _STEP, as_json=False, nothing="")
    if plan.messages_lost and not accept_loss:
        say(f"{plan.messages_lost} messages would be lost. Copy the store first; --accept-loss gives them up.")
        return UNHEALTHY
    if not yes:
        lost = f", {plan.messages_lost} messages are given up" if plan.messages_lost else ""
        click.confirm(f"Do this to {path}{lost}?", abort=True, err=True)
    with progress("repairing") as note:
        done = rmq_spark.repair(
            plan, accept_loss=accept_loss, lock_timeout_ms=round(lock_timeout_s * 1000), progress=note
        )
    if as_json:
        print_json(done.report.to_table().to_pylist())
    else:
        console().print(str(done.report), markup=False)
    return 0 if done.report.is_healthy else UNHEALTHY


def _steps(plan: Any) -> list[dict[str, Any]]:
    return list(plan.to_table().to_pylist())
