# The same steps that .ci/run takes; run them in a virtual environment made with `make install`.
.PHONY: install test lint types wheel demo bench matrix

install:
	pip install -c constraints.txt -e ".[dev]"

test:
	pytest -n auto

# the tests that touch transformers on every version that is promised; hours: see tests/versions.py for less
matrix:
	python tests/versions.py --keep-going

lint:
	ruff check .
	ruff format --check .

types:
	mypy

wheel:
	python -m build --wheel

demo:
	rope-ext demo

bench:
	python benchmarks/rotary_forward.py
