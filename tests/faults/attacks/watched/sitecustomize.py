"""Put on PYTHONPATH, it runs in every Python that starts: trainer, agent, command line.

Each logs all that all loggers have at DEBUG into a file of its own in $WATCHED, and none can unpickle: it writes who tried.
"""

import _pickle
import logging
import os
import pickle
import traceback

_folder = os.environ["WATCHED"]
_handler = logging.FileHandler(os.path.join(_folder, f"{os.getpid()}.log"))
_handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s %(args)s"))
logging.getLogger().addHandler(_handler)
logging.getLogger().setLevel(logging.DEBUG)
logging.getLogger("objckpt.watched").info("watched")


def _refuse(*_: object, **__: object) -> None:
    with open(os.path.join(_folder, f"{os.getpid()}.unpickled"), "a") as file:
        traceback.print_stack(file=file)
    raise AssertionError("something was unpickled")


class _Unpickler:
    __init__ = _refuse


for _module in (pickle, _pickle):
    _module.loads = _module.load = _refuse
    _module.Unpickler = _Unpickler
pickle._Unpickler = _Unpickler
