"""`rmq check` and `rmq repair`: find the damage of a store, and repair it."""

import sys
import textwrap
from typing import Any

import click

import rmq_spark
from rmq_spark.command.colours import meaning_of, paint
from rmq_spark.command.default_place import StoreCommand
from rmq_spark.command.output import print_data, printable, progress, rows_of, say, typed
from rmq_spark.command.parameters import appending, examples, reading
from rmq_spark.command.tables import PIPE_CHARS, show, terminal_width
from rmq_spark.store import count_text

NOT_HEALTHY = 3
_MAX_FINDINGS = 20
_CUT_ADVICE = """\
`rmq cat PATH TOPIC --queue ID --offset N` reads the messages after the damage; `rmq check` shows the queue offsets.
`rmq repair PATH --cut-log --accept-loss` truncates the log at the damage and loses all messages after it. Add --dry-run
to see their number."""
_STEP_COLUMNS = ("action", "what", "path", "messagesLost", "isDoneByRepair")


@click.command(
    cls=StoreCommand, epilog=examples("rmq check store", "rmq check store --json | jq '.[] | {severity, what, path}'")
)
@reading
def check(path: str, commit_log_path: str | None, as_data: bool) -> int:
    """Read every file of the store at PATH and report damage. Exit status 0 if the store is healthy, else 3.

    \b
    damage      messages are lost, will be lost, or cannot be read
    repairable  no message is lost; `rmq repair` or the next writer repairs it
    note        information; a store with notes is healthy

    The check changes nothing and may run next to a broker or a writer.
    """
    with progress("checking") as on_progress:
        report = rmq_spark.check(path, commit_log_path=commit_log_path, progress=on_progress)
    if as_data:
        table = report.to_arrow()
        print_data(rows_of(table), table.column_names)
    else:
        _print_report(report)
    return 0 if report.is_healthy else NOT_HEALTHY


@click.command(cls=StoreCommand, epilog=examples("rmq repair store --dry-run", "rmq repair store"))
@appending
@click.option("--dry-run", is_flag=True, help="Show the plan without applying it.")
@click.option("--yes", is_flag=True, help="Repair without confirmation. Losing messages also requires --accept-loss.")
@click.option("--accept-loss", is_flag=True, help="Allow the loss of messages. Their number is shown first.")
@click.option("--cut-log", is_flag=True, help="Truncate the log at damage in its middle: all later messages are lost.")
def repair(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    allow_network_store: bool,
    as_data: bool,
    dry_run: bool,
    yes: bool,
    accept_loss: bool,
    cut_log: bool,
) -> int:
    """Check the store at PATH, show a plan, and apply it after confirmation.

    Without a terminal, --yes is required.

    \b
    recover  finish the work of crashed writers, as the next writer would
    rebuild  rebuild queues, index or checkpoint from the log
    restore  replace a config file by its backup (.bak)
    cut      truncate the log at damage; only with --cut-log
    reset    move offsets back to the end of their queue; only with --cut-log
    clock    set back store times, or the timer, that are ahead of the clock
    leave    cannot be repaired; the text describes the next step

    Exit status 0 if the store is healthy at the end, else 3. Copy the store before you accept a loss of messages.
    """
    if as_data and not (yes or dry_run):
        raise click.UsageError("--json cannot ask for confirmation. Add --dry-run or --yes.")
    with progress("checking") as on_progress:
        plan = rmq_spark.plan_repair(path, commit_log_path=commit_log_path, cut_log=cut_log, progress=on_progress)
    can_cut = not cut_log and any(finding.action == "cut" for finding in plan.report.findings)
    if plan.is_empty or dry_run or not as_data:
        rows = rows_of(plan.to_arrow())
        if not as_data:
            rows = [{**row, "what": typed(row["what"]), "path": _inside(row["path"], plan.path)} for row in rows]
        nothing = "Nothing to repair: the store is healthy."
        show(rows, _STEP_COLUMNS, as_data=as_data, nothing=nothing, optional=("isDoneByRepair",))
    if plan.is_empty or dry_run:
        if plan.steps and plan.is_empty and not as_data:
            say("`rmq repair` cannot repair this without a loss." if can_cut else "`rmq repair` cannot repair this.")
            say(_CUT_ADVICE if can_cut else "The texts above describe the next steps.")
        return 0 if plan.report.is_healthy else NOT_HEALTHY
    if plan.is_lossy and not accept_loss:
        lost = f"{count_text(plan.messages_lost, 'message')} would be lost"
        say(f"{lost}, so nothing was changed. Copy the store, then repeat with --accept-loss.")
        return NOT_HEALTHY
    if not yes and not _confirm(path, plan):
        say("Nothing was changed.")
        return NOT_HEALTHY
    with progress("repairing") as on_progress:
        done = rmq_spark.repair(
            plan,
            accept_loss=accept_loss,
            lock_timeout_ms=round(lock_timeout_s * 1000),
            allow_network_store=allow_network_store,
            progress=on_progress,
        )
    if as_data:
        print_data(rows_of(plan.to_arrow()))
    else:
        say(f"{count_text(len(done.steps), 'step')} done, {len(done.left)} left. Checked again:")
        _print_report(done.report)
    return 0 if done.report.is_healthy else NOT_HEALTHY


def _confirm(path: str, plan: Any) -> bool:
    """Ask for confirmation on the terminal. False without a terminal, even if a pipe contains "yes"."""
    if not sys.stdin.isatty():
        say("Standard input is not a terminal, so confirmation is impossible. Add --yes to repair without it.")
        return False
    lost = f" {count_text(plan.messages_lost, 'message')} will be lost." if plan.is_lossy else ""
    click.echo(f"Apply this plan to {path}?{lost} [y/N] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        say("")  # Ctrl-D
    return answer.strip().lower() in ("y", "yes")


def _print_report(report: Any) -> None:
    """Print the summary line, and each finding as a paragraph: severity, path, problem and next step."""
    _print_wrapped(str(report).partition("\n")[0], "")
    rows = rows_of(report.to_arrow())
    for row in rows[:_MAX_FINDINGS]:
        name = paint(row["severity"], meaning_of("severity", row["severity"]), sys.stdout)
        click.echo(f"\n{name}  {printable(_inside(row['path'], report.path))}, position {row['position']}")
        expected = f": expected {row['expected']}, found {row['found']}" if row["expected"] or row["found"] else ""
        _print_wrapped(f"{row['what']}{expected}")
        if row["topic"] is not None:
            offsets = "" if row["begin"] is None else f", queue offsets [{row['begin']}, {row['end']})"
            count = f", {count_text(row['messages'], 'message')}" if row["messages"] else ""
            _print_wrapped(f"queue {row['topic']}/{row['queueId']}{offsets}{count}")
        if row["nextStep"]:
            _print_wrapped(typed(row["nextStep"]))
    if len(rows) > _MAX_FINDINGS:
        click.echo(f"\n… and {len(rows) - _MAX_FINDINGS:,} more. --json prints all.")


def _print_wrapped(text: str, indent: str = "    ") -> None:
    """Print a text in lines of the terminal's width; in a pipe in one line."""
    width = terminal_width() if sys.stdout.isatty() else PIPE_CHARS
    wrap = textwrap.TextWrapper(max(width, 40), initial_indent=indent, subsequent_indent="    ", break_on_hyphens=False)
    click.echo("\n".join(wrap.wrap(printable(text))))


def _inside(path: str, root: str) -> str:
    """Return a path relative to the store."""
    return path.removeprefix(f"{root}/")
