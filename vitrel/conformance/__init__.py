"""Conformance: position errors in anyone's model, found from outside.

`check` identifies the encoding of a model and tests it; `assert_position_conforms` raises what it finds, in a test. Read the
files in this order: `vitrel.inspect.recorder` (a forward pass seen through PyTorch's operators), `survey` (where tokens lie),
`measure` (angles and biases), `identify`, `checks`, `run`.
"""

from vitrel.conformance.report import Finding, Report
from vitrel.conformance.run import assert_position_conforms, check

__all__ = ["Finding", "Report", "assert_position_conforms", "check"]
