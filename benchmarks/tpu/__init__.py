"""Compilation for TPUs on machines without one: libtpu compiles for a chip given by its settings.

    make .cache/libtpu/.installed    # the libtpu of the installed JAX

Import this package before JAX: libtpu reads its settings when JAX first loads it.
"""

import os

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}.items():
    os.environ.setdefault(_name, _value)
