"""Provides the audit of a compiled program: each collective with its bytes, axes, loops and links.

`audit(compiled, mesh)` reads the text that XLA prints for CPU, GPU or TPU. Bytes are those on one device, and those of
the full array (the operand of a reduction or an exchange, the result of a gather), times the trip counts of loops. They
describe the compiled program: XLA:CPU sums bf16 in f32, and XLA:TPU splits a sum over two slices into a reduce-scatter
inside a slice, a sum between slices and an all-gather inside a slice. A loop with a peeled iteration appears as the
loop and, outside of it, that iteration; the totals over `times` are exact.
"""

from gregale.cost.collectives import Audit, Collective, audit
from gregale.cost.hlo import Loop
