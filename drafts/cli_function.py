@app.command()
def compare(
    folder: Annotated[Path, typer.Argument(help="a results folder of one model or experiment, or one that holds several")],
    more: Annotated[list[Path] | None, typer.Argument(help="with --seeds: folders of other seeds")] = None,
    seeds: Annotated[int | None, typer.Option(metavar="K", help="spread of every rate over K seeds of the dictionaries")] = None,
) -> None:
    """Put results beside the published numbers, and their shapes beside the paper's; write DIR/compare.csv."""
    from encode_address.compare import as_text, write
    from encode_address.compare import compare as beside

    if more and seeds is None:
        raise EncodeAddressError("further folders are for --seeds K")
    frame = beside(folder, *(more or ()), seeds=seeds)
    typer.echo(as_text(frame))
    typer.echo(f"\n{write(frame, folder)}")
