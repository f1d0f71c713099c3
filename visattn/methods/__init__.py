"""Methods: functions from a recording to a map on the token grid. No model in them, and no picture.

`METHODS` is the one table that explain, the command line, `inspect` and the messages of refusal read.
"""

from visattn.methods import diagnostics
from visattn.methods._attention import attention
from visattn.methods._pca import pca
from visattn.methods._query import SPELLINGS as QUERY_SPELLINGS
from visattn.methods._rollout import rollout
from visattn.methods._similarity import similarity
from visattn.methods._table import METHODS, Method, method_of

__all__ = ["METHODS", "QUERY_SPELLINGS", "Method", "attention", "diagnostics", "method_of", "pca", "rollout", "similarity"]
