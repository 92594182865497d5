"""`rmq check` and `rmq repair`: what of a store is damaged, and what can be done about it."""

import shutil
import sys
import textwrap
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import print_json, printable, rows_of, say, typed
from rmq_spark.command.progress import progress
from rmq_spark.command.tables import show
from rmq_spark.command.words import appending, examples, reading

NOT_HEALTHY = 3
_SHOWN = 20  # findings, of which there may be very many
_PIPE_CHARS = 10_000  # nobody looks: nothing is folded
_COLOURS = {"damage": "red", "repairable": "yellow"}
_AROUND = """\
`rmq cat PATH TOPIC --queue ID --offset N` reads on behind the damage; `rmq check` has the queue offsets.
`rmq repair PATH --cut-log --accept-loss` ends the log before it, and gives all messages behind it up: --dry-run says
how many."""
_STEP = ("action", "what", "path", "messagesLost", "isDoneByRepair")


@click.command(epilog=examples("rmq check store", "rmq check store --json | jq '.[] | {severity, what, path}'"))
@reading
def check(path: str, commit_log_path: str | None, as_json: bool) -> int:
    """Read every file of the store at PATH and say what is damaged. Exit status 0 only if it is healthy, else 3.

    \b
    damage      messages are lost, or will be, or cannot be read
    repairable  nothing is lost: `rmq repair`, or the next writer, makes it whole
    note        worth knowing; a store with notes is healthy

    Nothing is changed. It may run beside a broker or a writer.
    """
    with progress("checking") as note:
        report = rmq_spark.check(path, commit_log_path=commit_log_path, progress=note)
    if as_json:
        print_json(rows_of(report.to_arrow()))
    else:
        _print_report(report)
    return 0 if report.is_healthy else NOT_HEALTHY


@click.command(epilog=examples("rmq repair store --dry-run", "rmq repair store"))
@appending
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask. Messages are given up only with --accept-loss.")
@click.option("--accept-loss", is_flag=True, help="Give messages up that cannot be kept. How many is said before.")
@click.option("--cut-log", is_flag=True, help="Let the log end before damage in its middle: all behind it is lost.")
def repair(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    allow_network_store: bool,
    as_json: bool,
    dry_run: bool,
    yes: bool,
    accept_loss: bool,
    cut_log: bool,
) -> int:
    """Check the store at PATH, say what can be done about what is found, ask, and do it.

    Nothing is done unasked: without a terminal nothing at all, but with --yes.

    \b
    recover  finish what died writers left, as the next writer would
    rebuild  make queues, index or checkpoint anew from the log
    restore  put a config file's copy (.bak) in its place
    cut      end the log before damage; only with --cut-log
    reset    set offsets beyond their queues' ends back to those; only with --cut-log
    clock    set store times, or the timer, back that are ahead of the clock
    leave    nothing can be done here; the text says how to go on

    Exit status 0 if the store is healthy at the end, else 3. Copy a store before messages of it are given up.
    """
    if as_json and not (yes or dry_run):
        raise click.UsageError("With --json nobody is asked. Add --dry-run, or --yes.")
    with progress("checking") as note:
        plan = rmq_spark.plan_repair(path, commit_log_path=commit_log_path, cut_log=cut_log, progress=note)
    can_cut = not cut_log and any(finding.action == "cut" for finding in plan.report.findings)
    if plan.is_empty or dry_run or not as_json:
        nothing = "There is nothing to do: the store is healthy."
        rows = rows_of(plan.to_arrow()) if as_json else _steps(plan)
        show(rows, _STEP, as_json=as_json, nothing=nothing, spared=("isDoneByRepair",))
    if plan.is_empty or dry_run:
        if plan.steps and plan.is_empty and not as_json:
            say("None of this is repaired." if can_cut else "None of this can be repaired here.")
            say(_AROUND if can_cut else "The texts say how to go on.")
        return 0 if plan.report.is_healthy else NOT_HEALTHY
    if plan.is_lossy and not accept_loss:
        say(f"{plan.messages_lost:,} messages would be lost, so nothing was done. Copy the store, then --accept-loss.")
        return NOT_HEALTHY
    if not yes and not _is_wanted(path, plan):
        say("Nothing was changed.")
        return NOT_HEALTHY
    with progress("repairing") as note:
        timeout_ms = round(lock_timeout_s * 1000)
        done = rmq_spark.repair(
            plan,
            accept_loss=accept_loss,
            lock_timeout_ms=timeout_ms,
            allow_network_store=allow_network_store,
            progress=note,
        )
    if as_json:
        print_json(rows_of(plan.to_arrow()))
    else:
        say(f"{len(done.steps)} steps done, {len(done.left)} left. Checked again:")
        _print_report(done.report)
    return 0 if done.report.is_healthy else NOT_HEALTHY


def _is_wanted(path: str, plan: Any) -> bool:
    """Ask whoever sits at the terminal. Without one, as in a script, that is a no, whatever a pipe has to say."""
    if not sys.stdin.isatty():
        say("There is no terminal at which to ask: --yes does it unasked.")
        return False
    lost = f" {plan.messages_lost:,} messages are lost for good." if plan.is_lossy else ""
    click.echo(f"Do this to {path}?{lost} [y/N] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        say("")  # Ctrl-D
    return answer.strip().lower() in ("y", "yes")


def _steps(plan: Any) -> list[dict[str, Any]]:
    """Return the steps for people: paths are those in the store."""
    rows = rows_of(plan.to_arrow())
    return [{**row, "what": typed(row["what"]), "path": _inside(row["path"], plan.path)} for row in rows]


def _print_report(report: Any) -> None:
    """Print what was looked at, and each finding as a paragraph: what, where, and what can be done."""
    click.echo(printable(str(report).partition("\n")[0]))
    rows = rows_of(report.to_arrow())
    for row in rows[:_SHOWN]:
        name = click.style(row["severity"], fg=_COLOURS.get(row["severity"]), bold=True)
        click.echo(f"\n{name}  {printable(_inside(row['path'], report.path))}, position {row['position']}")
        expected = f": expected {row['expected']}, found {row['found']}" if row["expected"] or row["found"] else ""
        _print_indented(f"{row['what']}{expected}")
        if row["topic"] is not None:
            offsets = "" if row["begin"] is None else f", queue offsets [{row['begin']}, {row['end']})"
            count = f", {row['messages']:,} messages" if row["messages"] else ""
            _print_indented(f"queue {row['topic']}/{row['queueId']}{offsets}{count}")
        if row["nextStep"]:
            _print_indented(typed(row["nextStep"]))
    if len(rows) > _SHOWN:
        click.echo(f"\n… and {len(rows) - _SHOWN:,} more, which --json has.")


def _print_indented(text: str) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_CHARS
    indent = "    "
    lines = textwrap.wrap(printable(text), max(width, 40), initial_indent=indent, subsequent_indent=indent)
    click.echo("\n".join(lines))


def _inside(path: str, root: str) -> str:
    """Return a path in the store as it is there."""
    return path.removeprefix(f"{root}/")
