"""Mixtures of Gaussians: their likelihood, and EM that reads its data in chunks."""

from gatecrash.mixture.covariance import COVARIANCES, CovarianceName
from gatecrash.mixture.fit import Convergence, check_options, fit_mixture
from gatecrash.mixture.model import Mixture, log_prob_under, stacked
from gatecrash.mixture.rows import rows_at_once, widest

__all__ = [
    "COVARIANCES",
    "Convergence",
    "CovarianceName",
    "Mixture",
    "check_options",
    "fit_mixture",
    "log_prob_under",
    "rows_at_once",
    "stacked",
    "widest",
]
