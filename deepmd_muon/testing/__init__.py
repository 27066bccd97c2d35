"""Conformance tests for descriptors, losses and data formats of other packages.

Derive a test class from `DescriptorChecks`, `LossChecks` or `DataFormatChecks`, name the part under
test in a class attribute, and run pytest. This package's own parts run through the same classes.
"""

from deepmd_muon.testing.data_format import DataFormatChecks
from deepmd_muon.testing.descriptor import DescriptorChecks
from deepmd_muon.testing.loss import LossChecks

__all__ = ["DataFormatChecks", "DescriptorChecks", "LossChecks"]
