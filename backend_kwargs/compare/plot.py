"""Says what to write in place of the plots that this module drew in earlier releases."""

from backend_kwargs.errors import removed

raise removed("Module backend_kwargs.compare.plot", "write `compare -o FILE.html`, whose plots are SVG")
