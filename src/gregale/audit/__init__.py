"""What a compiled program really communicates: every collective, its bytes, axes, loops and links.

`audit(compiled, mesh)` reads the text that XLA prints for CPU, GPU or TPU. Bytes are those on one device, and those of
the full array (the operand of a reduction or an exchange, the result of a gather), times the turns of the loops. They
are what the backend does: XLA:CPU sums bf16 in f32, and XLA:TPU cuts a sum over two slices into a reduce-scatter inside
a slice, a sum between slices and an all-gather inside a slice. A loop of which the compiler peeled a turn appears as
the loop and, outside of it, that turn; the totals over `times` are exact.
"""

from gregale.audit.collectives import Collective
from gregale.audit.loops import Loop
from gregale.audit.report import Audit, audit

__all__ = ["Audit", "Collective", "Loop", "audit"]
