"""What a compiled program really communicates: every collective, its bytes, axes, loops and links."""

from gregale.audit.collectives import Collective
from gregale.audit.loops import Loop
from gregale.audit.report import Audit, audit
from gregale.audit.warnings import CompilerWarnings, captured_compiler_warnings

__all__ = ["Audit", "Collective", "CompilerWarnings", "Loop", "audit", "captured_compiler_warnings"]
