"""fedselect deploy: run a federation over a network."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedselect.cli import site_data, traffic
from fedselect.cli.engines import EngineName, engine_of, find_engine
from fedselect.cli.flags import EXTRA, configure, flags, words
from fedselect.cli.run_options import with_run_options
from fedselect.cli.terminal import console, say, say_metrics
from fedselect.core.errors import InputError
from fedselect.core.files import read_json
from fedselect.core.version import package_version

if TYPE_CHECKING:
    from fedselect.network.site import Site

_MORE = "Options of the method, data set, model, aggregator and local training are flags too, as in [bold]fedselect run[/bold]."
deploy_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="A real federation over a network, on Flower or gRPC."
)

DEMO_MODEL, DEMO_DATA = "mlp", {"train": "60"}
"""Defaults of the demo on digits. Simulated, three rounds reach 93% on held-out samples (seeds 200 and 201)."""
THREADS = "OMP_NUM_THREADS"
AGGREGATE = "clip; with --secret mean"  # default, as shown in the help
SiteDir = Annotated[
    Path, typer.Argument(help="The folder that `deploy init` created; on the server, its server/ folder is enough")
]
Clients = Annotated[int, typer.Option(help="Number of clients")]
DataName = Annotated[
    str, typer.Option("--data", help="Training data: a data set to divide among the clients, folder:PATH or table:PATH")
]
Method = Annotated[str | None, typer.Option(help="Method (default: fedselect)")]
ModelName = Annotated[str | None, typer.Option("--model", help="Model (default: depends on the data)")]
MinClients = Annotated[
    int, typer.Option(help="Clients that must answer in every round; with fewer, the round is repeated, then the run stops")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for a client's answer")]
Wait = Annotated[float, typer.Option(help="Seconds to wait for clients to connect")]
MaxNorm = Annotated[
    float | None,
    typer.Option(
        help="Reject an update whose norm is this many times the model's (default: reject updates larger than the model and "
        "100 times as large as those of the last rounds)"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS and no keys: anyone on the network path can read and change every message")
]
Shipped = Annotated[bool, typer.Option("--allow-shipped-code", help="On Flower: also run apps that ship their own code")]


@deploy_app.command(context_settings=EXTRA, epilog=_MORE)
@with_run_options(
    "seed", "task", "headline", "metrics", "keep", "view", "patience", "secret", "mean", "private", "adapt", aggregate=AGGREGATE
)
def demo(
    ctx: typer.Context,
    *,
    method: Method = None,
    clients: Clients = 3,
    data: DataName = "digits",
    model: ModelName = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for everything the demo writes")] = Path("runs/deploy-demo"),
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier demo")] = False,
    engine: EngineName = "flower",
    insecure: Insecure = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Try a deployment on this machine: create keys, start a server and clients, run, write a report, stop everything."""
    from fedselect.network import site
    from fedselect.network.control import follow, start
    from fedselect.network.home import Home
    from fedselect.network.plan import Shape, defaults, digest_of
    from fedselect.network.rounds import Limits
    from fedselect.report import write_report
    from fedselect.runs.progress import progress

    carrier = find_engine(engine)
    old = site.is_site(out)
    if old and not overwrite:
        raise InputError(f"{out} contains an earlier demo; choose another --out, or pass --overwrite to replace it.")
    site.check_free(out, old)
    _check_keys(given, insecure)
    more = flags(ctx.args)
    if data == "digits":
        model, more = model or DEMO_MODEL, {**DEMO_DATA, **more}
    config = configure(defaults(given), method, data, model, site_data.dealt(data, more, clients), rounds=rounds, **given)
    whole = config.make_data()
    if len(whole.clients) != clients:
        raise InputError(f"{data} has {len(whole.clients)} clients; pass --clients {len(whole.clients)}.")
    shape = Shape.of(whole)
    _warn(insecure)
    if old:
        shutil.rmtree(out)
    address, shared = f"127.0.0.1:{site.free_port()}", site_data.shared(config.data, shape)
    known = site.make(
        out, clients, address, shared, shape, insecure=insecure, days=30, names=site_data.named(whole), engine=engine
    )
    with ExitStack() as stack:
        stack.enter_context(_cores_shared(clients))
        tell = (lambda text: None) if quiet else say
        tell(traffic.said_of(config, shape, clients))
        tell("starting the server")
        stack.enter_context(carrier.server(out / "server", out / "server" / "log.txt"))
        tell(f"starting {clients} clients")
        own = site_data.at_home(config.data) if config.data.get("path") else {}
        for i in range(clients):
            part = out / f"client-{i}"
            home = Home(
                i, part.resolve() / "vault", own, config.model.get("weights"), "cpu", digest_of(shape.schema),
                site=str(part.resolve()),
            )  # fmt: skip
            stack.enter_context(carrier.client(part, home, part / "log.txt"))
        agreed = configure({"data": known.data}, None, None, None, {}, task=shape.task).data if shape.schema else config.data
        place = start(carrier, out / "server", replace(config, data=agreed), Limits(), None)
        with progress(console, quiet) as watch:
            follow(carrier, out / "server", place, watch)
    _outcome(place)
    if (chance := site_data.chance(whole)) is not None and not quiet:
        say(f"for comparison: always predicting each client's most frequent class reaches {100 * chance:.1f}% accuracy")
    say(f"wrote {write_report([place])}")


@contextmanager
def _cores_shared(clients: int) -> Iterator[None]:
    """Give each client its share of this machine's cores. If each took all, large models would train far slower."""
    if THREADS in os.environ:
        yield
        return
    os.environ[THREADS] = str(max(1, (os.cpu_count() or 1) // clients))
    try:
        yield
    finally:
        del os.environ[THREADS]


@deploy_app.command(context_settings=EXTRA)
def init(
    ctx: typer.Context,
    *,
    root: Annotated[Path, typer.Argument(help="The folder to create")],
    clients: Clients = 3,
    address: Annotated[str, typer.Option(help="HOST:PORT at which clients reach the server")] = "127.0.0.1:8000",
    data: DataName = "digits",
    classes: Annotated[
        str | None, typer.Option(help="Class names, separated by commas, if clients bring their own data")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one input, such as 3,224,224, if clients bring their own data")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="Schema of the clients' tables, written by `fedselect data merge`")
    ] = None,
    names: Annotated[str | None, typer.Option(help="Client names, separated by commas (default: those in the data)")] = None,
    engine: EngineName = "flower",
    insecure: Insecure = False,
) -> None:
    """Create a site: a folder with a part for the server and for each client, TLS certificates and node keys."""
    from fedselect.data import Schema
    from fedselect.network import site
    from fedselect.network.plan import Shape

    find_engine(engine)
    at_hand: tuple[str, ...] = ()
    if schema is None:
        table, agreed, at_hand = site_data.agreed(data, classes, shape, flags(ctx.args), clients)
    elif ctx.args or classes or shape or data not in ("digits", "table"):  # digits is the default
        raise InputError("--schema already describes the clients' data; remove --data and its options, --classes and --shape.")
    else:
        agreed = Shape.of_table(Schema.read(schema))
        table = site_data.shared({"name": "table"}, agreed)
    _warn(insecure)
    called = tuple(words(names)) if names else at_hand if len(at_hand) == clients else ()
    made = site.make(root, clients, address, table, agreed, insecure=insecure, days=365, names=called, engine=engine)
    if engine == "flower":
        _app(root / "app", made)
    say(f"created {root}: {clients} clients, server at {address}; {root / 'README.md'} explains which part goes where")
    say(_usual_model(made))


@deploy_app.command()
def renew(
    root: Annotated[Path, typer.Argument(help="The folder that `deploy init` created, with its ca/")],
    days: Annotated[int, typer.Option(help="Days until the certificate expires")] = 365,
) -> None:
    """Issue a new server certificate when the old one has expired."""
    from fedselect.network import site

    if days < 1:
        raise InputError(f"--days must be at least 1, not {days}.")
    site.renew(root, days)
    say(f"wrote {root / 'server' / 'server.crt'}; copy it and server.key to the server")


@deploy_app.command()
def server(part: Annotated[Path, typer.Argument(help="The server's part of the site")], shipped_code: Shipped = False) -> None:
    """Run the server of a site. It uses TLS and knows the clients' keys. Ctrl-C stops it."""
    from fedselect.network import site
    from fedselect.network.site import Site

    site.check_kind(part, "server")
    engine = engine_of(part)
    _warn(Site.read(part).insecure)
    engine.serve(part, say, shipped_code)


@deploy_app.command(context_settings=EXTRA)
def client(
    ctx: typer.Context,
    *,
    part: Annotated[Path, typer.Argument(help="This client's part of the site")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="The client's own data: folder:PATH or table:FILE (default: its share of the site's data set)"
        ),
    ] = None,
    vault: Annotated[
        Path | None, typer.Option(help="Folder for the client's personal state (default: vault/ in its part)")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="The client's copy of the weights file that a run starts from")] = None,
    private: Annotated[
        str | None, typer.Option(help="Join only runs with at least this privacy: epsilon=8,unit=sample")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or one GPU such as cuda:1")] = "auto",
    secret: Annotated[bool, typer.Option("--secret", help="Join only runs with secure aggregation")] = False,
    shipped_code: Shipped = False,
) -> None:
    """Run a client with its own data and vault. Options of the data are flags: --val 10. Ctrl-C stops it."""
    from fedselect.data.tables import check_options
    from fedselect.network import site
    from fedselect.network.home import Home, own_data, undealt
    from fedselect.network.plan import digest_of
    from fedselect.network.site import Site
    from fedselect.private import Private
    from fedselect.runs.config import at_path

    site.check_kind(part, "client")
    engine, known = engine_of(part), Site.read(part)
    _warn(known.insecure)
    _check_keys({"secret": secret}, known.insecure)
    number = int(read_json(part / "client.json", "it must contain the number of this client.")["client"])
    given = flags(ctx.args)
    own: dict[str, Any] = {}
    wanted = at_path({"name": data or known.data["name"]})
    task = {"name": known.shape.task}
    agreed = configure({"data": known.data, "task": task}, None, None, None, {})
    config = configure(
        {"data": {**site_data.alike(known.data, wanted["name"]), **wanted}, "task": task}, None, None, None, given
    )
    if data is not None or given:
        own = site_data.at_home(config.data)
        if "path" in own and "clients" not in given:
            own |= undealt(own["name"])
    if known.shape.schema is not None:
        check_options(known.shape.schema, config.data)
    own_data(own, agreed, number, known.clients, known.shape)  # missing or unsuitable data is an error now, not in a round
    home = Home(
        number, (vault or part / "vault").resolve(), own, None if weights is None else str(weights.resolve()), device,
        digest_of(known.shape.schema), site=str(part.resolve()), secret=secret,
        private="" if private is None else str(Private.read(private)),
    )  # fmt: skip
    engine.work(part, home, say, shipped_code)


@deploy_app.command(context_settings=EXTRA, epilog=_MORE)
@with_run_options(
    "rounds",
    "seed",
    "fraction",
    "eval_every",
    "task",
    "headline",
    "metrics",
    "keep",
    "view",
    "patience",
    "secret",
    "mean",
    "private",
    "adapt",
    aggregate=AGGREGATE,
)
def run(
    ctx: typer.Context,
    *,
    root: SiteDir,
    method: Method = None,
    model: ModelName = None,
    min_clients: MinClients = 1,
    timeout: Timeout = 600.0,
    wait: Wait = 60.0,
    max_norm: MaxNorm = None,
    name: Annotated[str | None, typer.Option(help="A name for the run, or the name of the run to resume")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume a run that was interrupted or that a client did not finish: the last one, or --name"
        ),
    ] = False,
    go_back: Annotated[
        bool,
        typer.Option("--go-back", help="With --resume: use an older checkpoint, even if most clients then start over"),
    ] = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Start a run from the server's machine and show its progress. Ctrl-C stops the run, --resume continues it."""
    from fedselect.network.behind import SUMS_ONCE
    from fedselect.network.control import follow, server_part, start, submit, unfinished
    from fedselect.network.drive import config_of
    from fedselect.network.plan import defaults
    from fedselect.network.rounds import Limits
    from fedselect.network.site import Site
    from fedselect.runs.progress import progress

    part = server_part(root)
    engine, known = engine_of(part), Site.read(part)
    if resume:
        if ctx.args or any(v is not None for v in (method, model, *given.values())):
            raise InputError("a resumed run keeps its configuration; remove the other options, or start a new run.")
        place = unfinished(part, name)
        if config_of(place).secret and go_back:  # also refuse this before the run continues
            raise InputError(SUMS_ONCE)
        submit(engine, part, place, go_back)
    elif go_back:
        raise InputError("--go-back works only with --resume; add it.")
    else:
        limits = Limits(min_clients, timeout, wait, max_norm=max_norm)
        more = flags(ctx.args)
        if more.get("clients", str(known.clients)) != str(known.clients):
            raise InputError(f"this federation has {known.clients} clients; remove --clients.")
        of_site = {"data": known.data, "task": {"name": known.shape.task}}
        _check_keys(given, known.insecure)
        config = configure({**defaults(given), **of_site}, method, None, model, more, **given)
        if not quiet:
            say(traffic.said_of(config, known.shape, known.clients))
        place = start(engine, part, config, limits, name)
    with progress(console, quiet) as watch:
        follow(engine, part, place, watch)
    _outcome(place)


@deploy_app.command()
def status(root: SiteDir) -> None:
    """Show which clients are connected, and for every run its rounds, headline metric and missed rounds."""
    from fedselect.network.control import reason, runs, server_part, state, unrecorded
    from fedselect.network.drive import attendance
    from fedselect.network.site import Site
    from fedselect.private import Private
    from fedselect.runs.progress import measured
    from fedselect.runs.rundir import again, finished, headline, read_config, read_records

    part = server_part(root)
    engine, known = engine_of(part), Site.read(part)
    up = engine.healthy(part)
    say(f"federation {known.federation}: {known.clients} clients, server at {known.address} is {'up' if up else 'down'}")
    for i, how in engine.connected(part).items():
        say(f"  client {known.who(i)}: {how}")
    for place in runs(part):
        records, how = read_records(place / "metrics.jsonl", growing=not finished(place)), state(place)
        shown = headline(place)
        last = next((r for r in reversed(records) if r[shown.name] is not None), None)
        done = measured(last, shown) if last else "-"
        if last and last is not records[-1]:
            done += f" after round {last['round']}"
        say(f"{place.name}: {how}, round {len(records)} of {read_config(place)['rounds']}, {shown.name} {done}")
        if how in ("failed", "stopped"):
            say(f"  {reason(place)}")
        if how == "interrupted":
            say(f"  {unrecorded(engine, part)}; {'' if up else 'start the server, then '}resume with: {again(place)}")
        if how == "not started":
            say(f"  the server did not start it (see {part / 'log.txt'}); resume with: {again(place)}")
        if records and records[-1].get("epsilon") is not None:
            private = Private.read(read_config(place)["private"])
            say(f"  privacy: epsilon {records[-1]['epsilon']:.3g} of {private.epsilon:g} spent per {private.unit}")
        _attendance(place.name, attendance(records))


@deploy_app.command()
def export(
    part: Annotated[Path, typer.Argument(help="The client's part of the site")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write (default: model.safetensors in the client's part)")
    ] = None,
    vault: Annotated[
        Path | None, typer.Option(help="Folder for the client's personal state (default: vault/ in its part)")
    ] = None,
    run: Annotated[str | None, typer.Option(help="The run (default: the last finished one)")] = None,
    view: Annotated[
        str | None, typer.Option(help="local, merged, or best for a run with --view best (default: the reported model)")
    ] = None,
) -> None:
    """Write this client's personalized model as safetensors (a state_dict). The model exists only on this client."""
    from fedselect.network import site
    from fedselect.network.export import export_model

    if vault is None:
        site.check_kind(part, "client")
        if not (part / "client.json").is_file():
            raise InputError(
                f"{part} is not a client's part of a site: it has no client.json; pass the client's part, or --vault."
            )
    out = out or part / "model.safetensors"
    made = export_model(vault or part / "vault", out, run, view)
    say(f"wrote {out}: the model of {made.run} ({made.view})")
    if made.snippet:
        say(f"\n{made.snippet}")


def _usual_model(known: Site) -> str:
    """A sentence about the default model of a run and its traffic."""
    from fedselect.network.plan import DEFAULTS

    config = configure({**DEFAULTS, "data": known.data, "task": {"name": known.shape.task}}, None, None, None, {})
    name = config.model["name"]
    try:
        cost = traffic.said_of(config, known.shape, known.clients)
        return f"default model of deploy run: {name} (change it with --model); {cost}"
    except InputError:
        return f"the default model {name} does not accept these inputs; choose another with: fedselect deploy run --model mlp"


def _app(folder: Path, known: Site) -> None:
    """Write the site as a plain Flower app, for users with their own Flower federation."""
    from fedselect.network import site
    from fedselect.network.plan import DEFAULTS, Plan
    from fedselect.runs.config import Config

    config = Config.from_dict({**DEFAULTS, "data": known.data, "task": {"name": known.shape.task}}, "the app").complete()
    flat = Plan(config, "", "", known.clients, known.shape).to_flat()
    kept = {k: v for k, v in flat.items() if "." not in k or k.endswith(".name") or k.startswith("data.")}
    site.write_app(folder, kept, package_version())


def _outcome(place: Path) -> None:
    from fedselect.runs import tables

    console.print(tables.render(tables.rows([place])))
    say_metrics([place], "test")
    _attendance(place.name, read_json(place / "summary.json", "it must contain the outcome of a run."))
    say(f"run in {place}")


def _attendance(name: str, summary: dict[str, Any]) -> None:
    for client, rounds in summary["missed"].items():
        why = summary.get("why", {}).get(client)  # missing in runs of older versions
        which = f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds))}"
        say(f"  client {client} missed {which}" + (f": {why}" if why else ""))
    for turned in summary["rejected"]:
        say(f"  round {turned['round']}, {turned['who']} rejected: {turned['why']}")
    for back in summary.get("set_back", []):
        say(f"  round {back['round']}, {back['who']} reset to an older state: {back['why']}")
    for client, why in summary.get("absent", {}).items():
        say(f"  client {client} missed the end ({why}) and has no model: start it, then resume with --resume --name {name}")


def _check_keys(given: dict[str, Any], insecure: bool) -> None:
    if given.get("secret") and insecure:
        raise InputError("--secret needs the keys of a site, but this site is --insecure; create it without --insecure.")


def _warn(insecure: bool) -> None:
    if insecure:
        print("warning: no TLS and no keys; anyone on the network path can read and change everything.", file=sys.stderr)
