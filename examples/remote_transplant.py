"""Which block moves the address, on a model that is not here: every block's output at the last token, in one job of an NDIF server.

NDIF_API_KEY=... python examples/remote_transplant.py [MODEL]        MODEL: a hub name; NDIF_HOST: another server than the public one
"""

import sys

import encode_address as ea

model = ea.load(sys.argv[1] if len(sys.argv) > 1 else "tiny-gdn", remote=True)  # no weights are fetched
print(model, "at", model.place)

# The host asks one key of a dictionary, the donor another. A block that writes the address makes the host look up the donor's.
pairs = ea.tasks.dictionary(model, "chat8").questions(30)
cells = [
    ea.Cell(
        "transplant",
        pair.host,
        layers=block.layers,
        where=pair.host.span("final"),
        donor=pair.donor,
        source=pair.donor.span("final"),
        outcomes=(("redirected", pair.host.choices[pair.donor_index]), ("kept", pair.host.answer)),
        labels={"block": block.name, "pair": pair.pair},
    )
    for block in model.layout.blocks
    for pair in pairs
]
engine = ea.Engine(model)
print(engine.plan(cells))
table = engine.run(cells)
print(table.groupby("block")[["redirected", "kept"]].mean().round(2))
print(f"{model.where.jobs} job, {model.where.up:,} bytes up, {model.where.down:,} bytes down")
