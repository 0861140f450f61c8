"""The kept texts as programs, and what of a program is the same in all versions."""

from programs import build

from zerojax.hlo.program import read_program

MESH = {"node": 2, "local": 8}
VERSIONS = ("0.10.2", "0.11.2", "0.12.0.1")
WEIGHT = 1024 * 1024 * 2  # bytes of one layer's weight in bfloat16


def kept(name: str, version: str):
    return read_program(build.text_of(f"{name}.jax-{version}"), MESH)


def rows(program, **conditions) -> set[tuple]:
    """What is the same in all versions: sort, array and bytes of each collective; not its name, order or mode."""
    return {
        (one.kind, one.axes, one.dtypes, one.payload_bytes, one.executions, one.received_bytes, one.node_bytes)
        for one in program.select(**conditions)
    }
