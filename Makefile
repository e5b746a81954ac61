# The same steps that .ci/run takes; run them in a virtual environment made with `make install`.
.PHONY: install test lint types wheel demo bench

install:
	pip install -c constraints.txt -e ".[dev]"

test:
	pytest -n auto

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
