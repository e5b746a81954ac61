"""Real clients of a patched model, each against the plain patched model.

    pip install -c constraints.txt -e ".[test,clients]"
    PYTHONPATH=tests python -m clients [--only NAME] [--stock PYTHON]

Every case runs a package's own code on a tiny random checkpoint; no client is imitated. A client whose package is not
installed is skipped with that reason. The command prints one table and fails where a case did not end as it should.
"""
