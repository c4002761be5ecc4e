"""Faults for `benchmarks/chaos.py --planted`: programs that every Python of a run begins with. Each must be found."""

from __future__ import annotations

_AFTER = '''
import importlib.util, sys
class Finder:
    """Changes a module right after it was imported, and imports nothing by itself."""
    def find_spec(self, name, path=None, target=None):
        if name != MODULE: return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        right = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (right(module), plant(module))
        return spec
sys.meta_path.insert(0, Finder())
'''
_LOST_LINE = '''
MODULE = "shoal.serve.output_file"
def plant(module):
    """The first answer of each run is counted, and not written."""
    right = module.OutputFile.write
    def write(self, entry):
        if getattr(self, "lost", False): return right(self, entry)
        self.lost = True
        self._count(module.id_of(entry), entry)
        return True
    module.OutputFile.write = write
'''
_DOUBLED_LINE = '''
MODULE = "shoal.serve.output_file"
def plant(module):
    """The last answer of the file is written again at the end of each run."""
    leave = module.OutputFile.__exit__
    def again(self, *why):
        self._file.seek(0)
        self._file.write(self._file.readlines()[-1])
        leave(self, *why)
    module.OutputFile.__exit__ = again
'''
_CHUNKS = '''
MODULE = "shoal.serve.responses"
def plant(module):
    """Every seventh chunk of a stream is sent so many times."""
    import itertools
    right, number = module.ApiResponse._chunk, itertools.count(1)
    def chunk(self, *arguments):
        made = right(self, *arguments)
        return made * TIMES if next(number) % 7 == 0 else made
    module.ApiResponse._chunk = chunk
'''
BATCHES = {"lost": _LOST_LINE + _AFTER, "doubled": _DOUBLED_LINE + _AFTER}
SERVERS = {"lost": "TIMES = 0" + _CHUNKS + _AFTER, "doubled": "TIMES = 2" + _CHUNKS + _AFTER}
