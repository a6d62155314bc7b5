"""The command line: `encode-address find | run | transfer | replace | paper | compare | plan | check | remote | show | models | train | figures`. Knows experiments and tables, no model internals."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from encode_address.errors import EncodeAddressError, StoreError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Find the Encode-Address circuit of hybrid language models. Add --debug to any command for tracebacks.",
)

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N; default: cuda where there is one")]
Dtype = Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16")]
Revision = Annotated[str | None, typer.Option(help="hub revision of the model")]
Variants = Annotated[str | None, typer.Option(help="e.g. chat8,list8,rev8 (default), chat8/far, long512")]
Pairs = Annotated[int | None, typer.Option(help="prompt pairs per variant; default: the paper's")]
Seed = Annotated[int, typer.Option(help="seed of dictionaries; 0: the paper's")]
Quick = Annotated[bool, typer.Option("--quick", help="fewer pairs and chat8 only, unless given")]
Pool = Annotated[str, typer.Option(help="word pool")]
TextSource = Annotated[str | None, typer.Option(help="for perplexity: a file, wikitext-2-v1, bundled")]
Data = Annotated[str | None, typer.Option(help="removal-mmlu: folder or file; default: the hub's")]
Knowledge = Annotated[bool | None, typer.Option("--knowledge", help="pruning: six question sets too, by lm-eval")]
Normalisation = Annotated[str | None, typer.Option(help="pruning: own (default) or paper")]
BatchTokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="of one trace; default: from free memory")]
Fresh = Annotated[bool, typer.Option("--fresh", help="start over: forget the rows of earlier runs")]
Remote = Annotated[bool, typer.Option("--remote", help="run it on an NDIF server (encode-address remote)")]
Deadline = Annotated[float | None, typer.Option(help="--remote: seconds that one job may take (1800)")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what it would cost and stop")]


@app.command()
def find(
    model: Annotated[list[str], typer.Option(help="bundled name, hub name or folder; repeat for several models")],
    variants: Variants = None,
    n: Pairs = None,
    seed: Seed = 0,
    quick: Quick = False,
    pool: Pool = "A",
    text: TextSource = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    out: Annotated[Path, typer.Option(help="results go to OUT/<model>/")] = Path("results"),
    batch_tokens: BatchTokens = None,
    fresh: Fresh = False,
    remote: Remote = False,
    deadline: Deadline = None,
    dry_run: DryRun = False,
) -> None:
    """Find Encode, Address and readers, with controls; write the table, the verdict and the figures."""
    from encode_address import circuit as job
    from encode_address.figures import draw_all
    from encode_address.models.loading import BUNDLED, card, load, pick_device
    from encode_address.processes import side_by_side

    chosen = variants.split(",") if variants is not None else ["chat8"] if quick else list(job.VARIANTS)
    pairs = n if n is not None else job.QUICK_N if quick else job.N
    small = not remote and set(model) <= set(BUNDLED) and pick_device(device).type == "cpu"
    if not dry_run and len(model) > 1 and small:
        options = {"variants": ",".join(chosen), "n": pairs, "seed": seed, "pool": pool, "text": text, "out": out}
        options |= {"batch-tokens": batch_tokens, "fresh": fresh}
        return side_by_side(["find"], model, {**options, "device": device, "dtype": dtype, "revision": revision})
    for i, name in enumerate(model):
        loaded = load(name, device=device, dtype=dtype, revision=revision, remote=remote, deadline=deadline)
        asked = (loaded, chosen, pairs, seed, text, pool, out)
        if dry_run:
            typer.echo(job.dry_run(*asked, batch_tokens=batch_tokens, fresh=fresh))
            continue
        found = job.find(*asked, batch_tokens=batch_tokens, fresh=fresh)
        draw_all(found.folder)
        if i:
            typer.echo()
        for line in card(loaded).get("imposed", []):
            typer.echo(f"imposed in training: {line}")
        typer.echo(job.report(found, loaded))
        typer.echo(found.folder)


@app.command()
def run(
    experiment: Annotated[str | None, typer.Argument(help="its name (see --list)")] = None,
    listed: Annotated[bool, typer.Option("--list", help="list the experiments and stop")] = False,
    model: Annotated[str | None, typer.Option(help="bundled name, hub name or folder")] = None,
    variants: Variants = None,
    n: Pairs = None,
    seed: Seed = 0,
    quick: Quick = False,
    pool: Pool = "A",
    text: TextSource = None,
    data: Data = None,
    knowledge: Knowledge = None,
    normalisation: Normalisation = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    out: Annotated[Path, typer.Option(help="results go to OUT/<model>/<experiment>/")] = Path("results"),
    batch_tokens: BatchTokens = None,
    fresh: Fresh = False,
    remote: Remote = False,
    deadline: Deadline = None,
    dry_run: DryRun = False,
) -> None:
    """Run one experiment of the paper: table, conclusion and figures."""
    from encode_address import lab
    from encode_address.figures import draw_all
    from encode_address.models.loading import card, load

    if listed:
        return typer.echo(lab.listing())
    if experiment is None or model is None:
        raise EncodeAddressError("say which experiment and which model: encode-address run transplant --model tiny-gdn")
    own = {"data": data, "knowledge": knowledge, "normalisation": normalisation}
    own = {option: value for option, value in own.items() if value is not None}
    lab.options_of(experiment, own)  # before a model is loaded
    loaded = load(model, device=device, dtype=dtype, revision=revision, remote=remote, deadline=deadline)
    options = {"n": n, "seed": seed, "quick": quick, "text": text, "pool": pool, "out": out, **own}
    options |= {"variants": variants.split(",") if variants else None, "batch_tokens": batch_tokens, "fresh": fresh}
    if dry_run:
        return typer.echo(lab.dry_run(experiment, loaded, **options))
    result = lab.experiment(experiment, loaded, **options)
    draw_all(result.folder)
    for line in card(loaded).get("imposed", []):
        typer.echo(f"imposed in training: {line}")
    typer.echo(result.sentence)
    typer.echo(result.folder)


@app.command()
def transfer(
    donor: Annotated[str, typer.Option(help="the model that lends its Address output")],
    host: Annotated[str, typer.Option(help="the model that it is put into")],
    source: Annotated[str | None, typer.Option(help="the donor's blocks, G2 or G2+G3; default: its verdict's")] = None,
    target: Annotated[str | None, typer.Option(help="the host's blocks, G2 or G2,G3; default: its verdict's")] = None,
    variants: Variants = None,
    n: Pairs = None,
    seed: Seed = 0,
    quick: Quick = False,
    fit: Annotated[int | None, typer.Option(help="dictionaries that a map is fitted on (2000)")] = None,
    seeds: Annotated[int | None, typer.Option(help="seeds of split and map (3)")] = None,
    pool: Pool = "A",
    text: TextSource = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path, typer.Option(help="results go to OUT/<host>/transfer-<donor>/")] = Path("results"),
    batch_tokens: BatchTokens = None,
    fresh: Fresh = False,
    remote: Remote = False,
    deadline: Deadline = None,
    dry_run: DryRun = False,
) -> None:
    """Transplant a donor's Address output into a host through a fitted map, with all controls: OUT/<host>/transfer-<donor>/."""
    from encode_address.cross import transfer as job
    from encode_address.figures import draw_all
    from encode_address.models.loading import load

    given = {"device": device, "dtype": dtype, "remote": remote, "deadline": deadline}
    models = [load(name, **given) for name in (donor, host)]
    options = {"source": source, "target": target, "n": n, "seed": seed, "quick": quick, "fit": fit, "seeds": seeds}
    options |= {"text": text, "pool": pool, "out": out, "batch_tokens": batch_tokens, "fresh": fresh}
    options |= {"variants": variants.split(",") if variants else None}
    if dry_run:
        return typer.echo(job.dry_run(*models, **options))
    result = job.transfer(*models, **options)
    draw_all(result.folder)
    typer.echo(result.sentence)
    typer.echo(result.folder)


@app.command()
def replace(
    donor: Annotated[str, typer.Option(help="the model that gives the block")],
    host: Annotated[str, typer.Option(help="the model whose block is replaced")],
    slot: Annotated[str, typer.Option(help="address, encode or both; several with commas")] = "address",
    source: Annotated[str | None, typer.Option(help="the donor's block; default: its verdict's")] = None,
    target: Annotated[str | None, typer.Option(help="the host's block(s), with commas; default: its verdict's")] = None,
    truncate: Annotated[int | None, typer.Option(help="stop the host after this layer")] = None,
    variants: Variants = None,
    n: Pairs = None,
    seed: Seed = 0,
    quick: Quick = False,
    pool: Pool = "A",
    text: TextSource = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path, typer.Option(help="results go to OUT/<host>/replace-<donor>/")] = Path("results"),
    batch_tokens: BatchTokens = None,
    fresh: Fresh = False,
    remote: Remote = False,
    deadline: Deadline = None,
    dry_run: DryRun = False,
) -> None:
    """Put a donor's block in place of a host's, through fitted maps, with all controls: OUT/<host>/replace-<donor>/."""
    from encode_address.cross import replace as job
    from encode_address.figures import draw_all
    from encode_address.models.loading import load

    given = {"device": device, "dtype": dtype, "remote": remote, "deadline": deadline}
    models = [load(name, **given) for name in (donor, host)]
    options = {"slot": slot, "source": source, "target": target, "truncate": truncate, "n": n, "seed": seed}
    options |= {"quick": quick, "text": text, "pool": pool, "out": out, "batch_tokens": batch_tokens, "fresh": fresh}
    options |= {"variants": variants.split(",") if variants else None}
    if dry_run:
        return typer.echo(job.dry_run(*models, **options))
    result = job.replace(*models, **options)
    draw_all(result.folder)
    typer.echo(result.sentence)
    typer.echo(result.folder)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="checkpoint of the paper (qwen3.5-9b), bundled name, hub name or folder")
    ],
    experiment: Annotated[str, typer.Option(help="find, or an experiment's name (run --list)")] = "find",
    variants: Variants = None,
    n: Pairs = None,
    seed: Seed = 0,
    quick: Quick = False,
    pool: Pool = "A",
    text: TextSource = None,
    dtype: Dtype = None,
    revision: Revision = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="own, a bundled name, a folder or a hub name; default: no hub is asked")
    ] = None,
    batch_tokens: BatchTokens = None,
) -> None:
    """Say what a model is and what an experiment on it would take, without its weights."""
    from encode_address.outlook import outlook

    asked = {"n": n, "seed": seed, "quick": quick, "text": text, "pool": pool, "dtype": dtype, "revision": revision}
    chosen = variants.split(",") if variants is not None else None
    typer.echo(outlook(model, experiment, variants=chosen, tokenizer=tokenizer, batch_tokens=batch_tokens, **asked))


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="bundled name, hub name or folder")],
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
) -> None:
    """Verify a model: layer kinds, every write fires, identity patches, split and padded execution, attention."""
    from encode_address.models.loading import load

    _checked(load(model, device=device, dtype=dtype, revision=revision))


def _checked(model: Any) -> None:
    report = model.check()
    typer.echo(str(report))
    if not report.ok:
        raise EncodeAddressError(f"{model.name}: a check failed (above); results on this model cannot be trusted")


remote_app = typer.Typer(help="The NDIF server that --remote runs models on (NDIF_HOST, NDIF_API_KEY).")
app.add_typer(remote_app, name="remote")


@remote_app.command("status")
def remote_status() -> None:
    """Say whether the server can be reached, its versions against ours, and which hybrid models it has up."""
    from encode_address.remote.status import status

    typer.echo(status())


@remote_app.command("check")
def remote_check(
    model: Annotated[str, typer.Argument(help="bundled name or hub name")],
    revision: Revision = None,
    deadline: Deadline = None,
) -> None:
    """Verify a model where it is, in one job: what `encode-address check` verifies of a local one."""
    from encode_address.models.loading import load

    _checked(load(model, revision=revision, remote=True, deadline=deadline))


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="a results folder of one model, or a folder that holds several")],
) -> None:
    """Summarise results: what was run with which model, how far it is, what it cost, the verdict."""
    from encode_address.show import show as screens

    typer.echo("\n\n".join(screens(folder)))


@app.command()
def paper(
    folder: Annotated[Path, typer.Argument(help="results, figures and tables go here")],
    model: Annotated[list[str] | None, typer.Option(help="run what it lacks; without: only tables, figures")] = None,
    n: Pairs = None,
    seed: Seed = 0,
    quick: Quick = False,
    pool: Pool = "A",
    text: TextSource = None,
    data: Data = None,
    knowledge: Knowledge = None,
    normalisation: Normalisation = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    batch_tokens: BatchTokens = None,
    remote: Remote = False,
    deadline: Deadline = None,
    dry_run: DryRun = False,
) -> None:
    """Run or resume every experiment on every model; write every figure and table of the paper, and results.md."""
    from encode_address import paper as whole
    from encode_address.models.loading import BUNDLED, load, pick_device
    from encode_address.processes import side_by_side

    asked = {"n": n, "seed": seed, "quick": quick, "pool": pool, "text": text, "data": data}
    asked |= {"knowledge": knowledge, "normalisation": normalisation}
    models = model or []
    small = not remote and set(models) <= set(BUNDLED) and pick_device(device).type == "cpu"
    if not dry_run and len(models) > 1 and small:
        options = {**asked, "batch-tokens": batch_tokens, "device": device, "dtype": dtype, "revision": revision}
        side_by_side(["paper", str(folder)], models, options)
        models = []  # they have run
    for name in models:
        loaded = load(name, device=device, dtype=dtype, revision=revision, remote=remote, deadline=deadline)
        if dry_run:
            typer.echo(whole.dry_run(loaded, folder, batch_tokens=batch_tokens, **asked))
            continue
        for experiment, why in whole.run(loaded, folder, batch_tokens=batch_tokens, **asked).items():
            typer.echo(f"{name} {experiment}: not run: {why}")
    if not dry_run:
        written = whole.write(folder)
        pictures = sum(path.suffix == ".png" for path in written["figures"])
        typer.echo(f"{pictures} figures, {len(written['tables'])} files of tables; {folder / 'results.md'}")


@app.command()
def compare(
    folder: Annotated[
        Path, typer.Argument(help="a results folder of one model or experiment, or one that holds several")
    ],
    more: Annotated[list[Path] | None, typer.Argument(help="with --seeds: folders of other seeds")] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="K", help="spread of every rate over K seeds of dictionaries")
    ] = None,
) -> None:
    """Put results beside the published numbers, and their shapes beside the paper's; write DIR/compare.csv."""
    from encode_address.compare import as_text, write
    from encode_address.compare import compare as beside

    if more and seeds is None:
        raise EncodeAddressError("further folders are for --seeds K")
    frame = beside(folder, *(more or ()), seeds=seeds)
    typer.echo(as_text(frame))
    typer.echo(f"\n{write(frame, folder)}")


@app.command()
def models() -> None:
    """List the bundled models (what they can do, what was imposed on them), and what each family of models supports."""
    from encode_address.models import cards, support

    typer.echo(f"{cards.listing()}\n\n{support.listing()}")


@app.command()
def train(
    model: Annotated[str, typer.Argument(help="tiny-gdn, tiny-mamba2 or tiny-gdn-negative")],
    seed: Annotated[int, typer.Option(help="of the initial weights and of all that is drawn")] = 0,
    out: Annotated[Path, typer.Option(help="goes to OUT/<model>-seed<N>/, a model to load to its model/")] = Path(
        "trained"
    ),
) -> None:
    """Train a bundled model from nothing, on one core; the same command goes on where a stopped one was."""
    from encode_address.train import train as run

    folder = run(model, seed, out, on_line=lambda line: typer.echo(_training(line), err=True))
    typer.echo(f"{folder}: try encode-address find --model {folder}")


def _training(line: dict) -> str:
    shown = ("accuracy", "keyless_accuracy", "text_loss")
    numbers = ", ".join(f"{name.replace('_', ' ')} {line[name]:.3f}" for name in shown if line.get(name) is not None)
    return f"{line['stage']} {line['step']}, {line['seconds']:.0f} s, {line['entries']} entries: {numbers}"


@app.command()
def figures(folder: Annotated[Path, typer.Argument(help="a results folder of one model")]) -> None:
    """Draw every figure that a results folder's table allows."""
    from encode_address.figures import draw_all

    drawn = draw_all(folder)
    typer.echo("\n".join(str(path) for path in drawn) or f"nothing to draw from {folder}/cells.parquet")


def main() -> None:
    """Run the command line: one line and exit code 2 for an error, 130 for Ctrl-C."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"] or ["--help"]
    try:
        code = app(arguments, standalone_mode=False)
        if code == 130:  # what newer versions of typer make of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        same = "the same command without --fresh" if "--fresh" in arguments else "the same command"
        _fail(f"interrupted; what was finished is kept, and {same} continues", debug, 130)
    except EncodeAddressError as error:
        _fail(str(error), debug)
    except OSError as error:
        _fail(str(StoreError(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")), debug)
    except Exception as error:
        if hasattr(error, "format_message"):  # the option parser's own complaints
            _fail(f"{error.format_message()} (see encode-address --help)", debug)
        _fail(f"unexpected {type(error).__name__}: {error}; run again with --debug and report it", debug)


def _fail(message: str, debug: bool, code: int = 2) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}" if code == 2 else message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
