"""Conformance: position errors in anyone's model, found from outside.

`check` identifies the encoding and tests it; `assert_position_conforms` is the same as a test. The order of reading:
`vitrel.inspect.recorder` (a forward pass seen through PyTorch's operators), `survey` (where tokens lie), `measure` (angles and
biases), `identify`, `checks`, `run`.
"""

from vitrel.conformance.report import Finding, Report
from vitrel.conformance.run import assert_position_conforms, check

__all__ = ["Finding", "Report", "assert_position_conforms", "check"]
