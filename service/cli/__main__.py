"""Makes `python -m decodestep.service.cli` the decodestep command."""

from decodestep.service.cli import main

raise SystemExit(main())
