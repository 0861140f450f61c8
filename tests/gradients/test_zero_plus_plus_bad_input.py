"""ZeRO++ that cannot take effect: what never can is refused when a configuration is made, the rest noticed by name."""

import pytest
from quantized_training import EVERYTHING, PAIR, layout_of

import zerojax
from zerojax import QuantFormat, ZeroConfig

# Only the notice in question counts: on these tiny leaves there are others.
pytestmark = pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")

REFUSED = [
    ({"stage": 2, "quantize_weights": "int8"}, "quantize_weights.*weights are gathered only at stage 3"),
    ({"stage": 1, "secondary": True}, "secondary.*weights are gathered only at stage 3"),
    ({"axes": ("data",), "secondary": True}, "secondary.*needs two axes"),
    ({"stage": 0, "quantize_gradients": "int8"}, "quantize_gradients.*stage 0 all-reduces full gradients"),
    ({"rounding": "stochastic"}, "rounding.*quantize_gradients, which is None"),
    ({"error_feedback": True}, "error_feedback.*quantize_gradients, which is None"),
    ({"axes": ("data",), **PAIR, "error_feedback": True}, "error_feedback.*there is one axis"),
    ({"stage": 2, "weight_deltas": "int4"}, "weight_deltas.*stage=2.*weights are gathered only at stage 3"),
    ({"axes": ("data",), "weight_deltas": "int4"}, "weight_deltas.*needs two axes"),
    ({"weight_deltas": "int3"}, "weight_deltas='int3'.*use None, 'int4', 'int2' or a QuantFormat"),
    ({"quantize_weights": QuantFormat(2, 32)}, "quantize_weights.*2 bits are for weight_deltas"),
    ({"quantize_weights": "int2"}, "quantize_weights='int2'.*'int8', 'int4' or a QuantFormat"),
    ({"quantize_gradients": ("int8", "int4", "int4")}, "one format, or a pair"),
    ({"quantize_gradients": "int8", "rounding": "up"}, "rounding must be 'nearest' or 'stochastic'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_can_never_take_effect_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroConfig(**options)


MALFORMED = [
    ({"bits": 3}, "bits must be 8 or 4"),
    ({"bits": 4, "block_size": 48}, "block_size must be a power of two from 16 to 2048"),
    ({"scale_dtype": "float8_e5m2"}, "scale_dtype must be"),
    ({"block_size": 2048, "scale_dtype": "float8_e4m3fn"}, "float8_e4m3fn scales need a block_size of at most 1024"),
    ({"bits": 8, "levels": "e2m1"}, "levels must be 'integer', or 'e2m1' with 4 bits"),
    ({"block_size": 32, "rotate": 64}, "rotate must be None, 32 or 64, and divide block_size"),
]


@pytest.mark.parametrize(("fields", "message"), MALFORMED, ids=[m for _, m in MALFORMED])
def test_a_malformed_format_is_refused_when_it_is_made(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantFormat(**fields)


NOTICED = [
    ("1x7", {"secondary": True}, "secondary has no effect: axis 'node' has one device, there is one node"),
    ("1x3", PAIR, "quantize_gradients reduces in a single hop over 'local', in the format for inside the node"),
    ("1x3", {**PAIR, "error_feedback": True}, "error_feedback has no effect: axis 'node' has one device"),
    ("1x3", {"weight_deltas": "int4"}, "weight_deltas has no effect: axis 'node' has one device"),
    ("1x1", EVERYTHING, "stage 3 has no effect"),
    ("data", {"quantize_gradients": "int8"}, "reduces in a single hop over 'data', in the format for between nodes"),
    ("2x4", {"quantize_weights": "int8"}, r"quantize_weights has blocks of 256 elements, more than the shard of"),
    ("2x4", {**PAIR, "min_quantize_size": 10**6}, "no leaf is quantised: none has two dims"),
]


@pytest.mark.parametrize(("mesh", "options", "message"), NOTICED)
def test_what_has_no_effect_on_this_mesh_is_noticed_by_name(mesh, options, message):
    with pytest.warns(zerojax.ZeroNotice, match=message):
        layout = layout_of(mesh, **options)
    assert any(message[:12] in line for line in layout.describe().splitlines())


