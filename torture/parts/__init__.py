"""The parts of ``make torture``: each module has ``NAME`` and ``run(options)``, and is found by being here."""
