"""``python -m quorem`` runs the ``quorem`` command."""

from .cli import main

if __name__ == "__main__":
    main()
