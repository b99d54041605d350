# make help lists the targets. Each does its whole set-up; see tools/setup.sh.
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
RANKS ?= 4
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-roce stress test-c asan tsan bench bench-roce bench-softnic conformance lint clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo "  variables: ARGS='pytest or script arguments', SAN=address,undefined|thread (test-c),"
	@echo "             PYTHON=/path/to/python3 (for .venv), TORCH=0 (leave torch out)"

demo: ## train a model on 4 ranks over the user-space RDMA device, twice
	@tools/setup.sh demo
	$(PY) -m rocecomm run -n $(RANKS) examples/train_digits.py --mode allreduce $(ARGS)
	$(PY) -m rocecomm run -n $(RANKS) examples/train_digits.py --mode ps $(ARGS)

test: ## the test suite on soft0, the user-space device
	@tools/setup.sh test stock torch mpi
	@$(PY) tools/ctest.py
	@bash -o pipefail -c '$(PYTEST) -q --ignore=tests/roce $(ARGS) 2>&1 | tee build/test.log'

test-roce: ## the same suite on kernel Soft-RoCE in a virtual machine, and interoperability
	@tools/setup.sh test roce
	@$(PY) tools/test_roce.py $(ARGS)

conformance: ## rdma-core's own test suite on soft0 and on rxe0, test by test
	@tools/setup.sh test stock roce
	@$(PY) tools/conformance.py --markdown docs/reference/conformance.md $(ARGS)

stress: ## the tests that take long
	@tools/setup.sh test torch mpi
	@ROCECOMM_TEST_ROUNDS=200 ROCECOMM_TEST_SLOW=10 $(PY) tools/ctest.py kill_storm
	$(PYTEST) -q -m stress $(ARGS)

test-c: ## the C tests of softnic; SAN=address,undefined or SAN=thread adds sanitizers
	@tools/setup.sh
	@$(PY) tools/ctest.py $(ARGS)

asan: ## the C tests and the test suite with softnic and extensions under ASan and UBSan
	@tools/setup.sh test stock
	@tools/asan.sh $(ARGS)

tsan: ## the C tests, and the tests that use threads, under the thread sanitizer
	@tools/setup.sh test
	@tools/tsan.sh $(ARGS)

bench: ## rocecomm against MPI, gloo, pyzmq, UCXX and perftest, in one run; ARGS='--rows PATTERN'
	@tools/setup.sh torch mpi perftest plot bench
	$(PY) benchmarks/run.py $(ARGS)

bench-roce: ## messages on kernel Soft-RoCE against perftest and gloo, in a virtual machine
	@tools/setup.sh torch perftest roce
	$(PY) benchmarks/roce.py $(ARGS)

bench-softnic: ## perftest on soft0 against raw C loops, in one run; ARGS='--rows PATTERN'
	@tools/setup.sh perftest
	$(PY) benchmarks/softnic/run.py $(ARGS)

lint: ## ruff, types of the stubs, layering and packaging rules, ABI
	@tools/setup.sh test lint
	.venv/bin/ruff check rocecomm tests examples benchmarks tools setup.py
	@tools/check_stubs.sh
	$(PYTEST) -q tests/test_layering.py tests/test_packaging.py tests/test_abi.py

clean: ## removes everything that was built, .venv too
	rm -rf build dist .venv *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find rocecomm -name '*.so' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
