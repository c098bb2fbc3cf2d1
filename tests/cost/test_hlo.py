"""The parser, on lines as XLA prints them."""

from gregale.cost.hlo import Shape, bits, parse, shapes_in


def test_a_module_is_taken_apart(stored):
    module = parse(stored("scheduled_module"))
    assert (module.entry, module.devices) == ("main", 8)
    assert list(module.computations) == ["region_0.1", "main"]
    assert module.computations["region_0.1"].root.opcode == "add"
    start = module.computations["main"].instructions["rs"]
    assert start.opcode == "reduce-scatter-start"
    assert start.operands == ("p", "gte")
    assert start.shapes[3] == Shape("bf16", (1,))
    assert start.op_name == "jit(f)/while/body/g(x)"
    assert module.computations["main"].instructions["q"].shapes == (Shape("s32", ()), Shape("bf16", (2,)))


def test_operands_without_percent_signs_and_with_inline_shapes():
    text = """HloModule m
ENTRY main {
  p = f32[4]{0} parameter(0)
  a = f32[4]{0} negate(f32[4]{0} p)
  ROOT b = f32[4]{0} add(a, p)
}
"""
    main = parse(text).computations["main"]
    assert main.instructions["a"].operands == ("p",)
    assert main.root.operands == ("a", "p")
    assert main.operand_shapes(main.root) == (Shape("f32", (4,)), Shape("f32", (4,)))


def test_metadata_of_a_kernel_over_several_lines_ends_no_computation(stored):
    main = parse(stored("kernel_metadata")).computations["main"]
    assert list(main.instructions) == ["x", "kernel", "sum"]
    assert main.root.name == "sum"
    assert [main.instructions[name].op_name.rpartition("/")[2] for name in ("kernel", "sum")] == ["kernel", "psum"]


def test_bytes_of_narrow_types_are_packed_and_rounded_up_and_sizes_may_be_bounded():
    widths = {"f32": 32, "bf16": 16, "pred": 8, "u4": 4, "s2": 2, "f8e4m3fn": 8, "f4e2m1fn": 4, "c64": 64}
    assert {dtype: bits(dtype) for dtype in widths} == widths
    assert Shape("u4", (3, 3)).bytes == 5
    assert Shape("bf16", ()).bytes == 2
    assert Shape("f32", (0, 7)).bytes == 0
    assert shapes_in("(f32[<=8,2]{1,0}, token[], u32[])") == (Shape("f32", (8, 2)), Shape("u32", ()))
