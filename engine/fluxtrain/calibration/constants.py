"""The former name of `measured_constants`, until `fluxtrain.planning` imports the new one."""

from fluxtrain.calibration.measured_constants import Constants

__all__ = ["Constants"]
