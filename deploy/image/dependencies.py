"""Print the distributions that pyproject.toml names, one per line, so that they can be a layer below the source.

python dependencies.py pyproject.toml [EXTRA ...]
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in sys.argv[2:])]
print("\n".join(requirement for requirements in lists for requirement in requirements))
