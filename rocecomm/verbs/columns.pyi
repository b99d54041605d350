from typing import Any

import numpy as np

SEND_WR_DTYPE: np.dtype[Any]
RECV_WR_DTYPE: np.dtype[Any]
SGE_DTYPE: np.dtype[Any]
WC_DTYPE: np.dtype[Any]
