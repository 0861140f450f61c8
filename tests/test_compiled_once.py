"""A text that is kept is that of the same program, target and options, or it is not found."""

import compiled_once
import jax
import jax.numpy as jnp
import pytest
from compiled_once import Program, compile_once, key_of

import zerojax

MESH = zerojax.make_mesh(2, 4)


def lowered(factor=2.0, width=8, scope="one", **options):
    def scaled(x):
        with jax.named_scope(scope):
            return jnp.sin(x) * factor

    return jax.jit(scaled, **options).lower(jax.ShapeDtypeStruct((width,), jnp.float32))


class Refused:
    """A lowered program that nobody may compile."""

    def __init__(self, program):
        self.as_text, self._lowering = program.as_text, program._lowering

    def compile(self, options):
        raise AssertionError("compiled again")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_once, "FOLDER", tmp_path / "texts")
    return tmp_path / "texts"


def test_a_second_compile_reads_what_the_first_made(folder):
    first = compile_once(lowered(), MESH, "h100")
    assert compile_once(Refused(lowered()), MESH, "h100") == first
    assert zerojax.read_program(first).memory == zerojax.read_program(lowered().compile()).memory
    assert [file.suffixes for file in folder.iterdir()] == [[".json", ".gz"]]


def test_a_cut_file_is_compiled_again(folder):
    first = compile_once(lowered(), MESH, "h100")
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:40])
    again = compile_once(lowered(), MESH, "h100")
    assert (again.figures, again.text.count("sine")) == (first.figures, first.text.count("sine"))
    assert compile_once(Refused(lowered()), MESH, "h100") == again


def test_whatever_the_compiler_is_given_is_in_the_key(monkeypatch):
    def key(program=None, mesh=MESH, target="h100", options=None):
        return key_of(lowered() if program is None else program, mesh, target, options)

    keys = [
        key(), key(lowered(3.0)), key(lowered(width=9)), key(lowered(scope="two")), key(target="b200"),
        key(mesh=zerojax.make_mesh(4, 2)),
        key(options={"xla_backend_optimization_level": 1}),
        key(lowered(compiler_options={"xla_backend_optimization_level": 1})),
    ]  # fmt: skip
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[-1]


def test_without_a_folder_to_write_to_programs_are_compiled(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiled_once, "FOLDER", tmp_path / "file" / "texts")
    assert isinstance(compile_once(lowered(), MESH, "h100"), Program)
