# Espalier on the CPU: docker build -t espalier . && docker run -p 8001:8001 -p 8002:8002 -v $PWD/models:/models:ro espalier
# … and on GPUs:       docker build -t espalier:cuda --target cuda . && docker run --gpus all … espalier:cuda
#
# The CUDA toolkit is taken from an image that has it in /usr/local/cuda-13.0; the driver is the host's.
ARG CUDA_TOOLKIT=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM debian:bookworm-slim AS build
WORKDIR /src
COPY deploy/install-packages deploy/install-packages
COPY deploy/packages deploy/packages
RUN deploy/install-packages build
COPY CMakeLists.txt CMakePresets.json ./
COPY proto proto
COPY kernels kernels
COPY engine engine
COPY service service
COPY clients clients
RUN cmake --preset release -DESPALIER_TESTS=OFF -DESPALIER_CUDA=OFF \
 && cmake --build --preset release --target espalierd espalier \
 && strip build/release/bin/espalierd build/release/bin/espalier

FROM debian:bookworm-slim AS serve
COPY deploy/install-packages deploy/install-packages
COPY deploy/packages/run.txt deploy/packages/run.txt
RUN deploy/install-packages run && rm -rf /var/lib/apt/lists/* deploy \
 && useradd --system --uid 10001 espalier && install -d -o espalier /state /models
COPY --from=build /src/build/release/bin/espalierd /src/build/release/bin/espalier /usr/bin/
USER espalier
EXPOSE 8001 8002
VOLUME /state
STOPSIGNAL SIGTERM
ENTRYPOINT ["espalierd"]
CMD ["--model_repository=/models", "--state_dir=/state"]

FROM ${CUDA_TOOLKIT} AS toolkit

# The module alone: it needs nothing of the server.
FROM debian:bookworm-slim AS cuda-build
WORKDIR /src
COPY deploy/install-packages deploy/install-packages
COPY deploy/packages deploy/packages
RUN deploy/install-packages build
COPY --from=toolkit /usr/local/cuda-13.0/ /usr/local/cuda/
COPY CMakeLists.txt CMakePresets.json ./
COPY kernels kernels
RUN cmake --preset cuda -DESPALIER_TESTS=OFF -DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc \
 && cmake --build --preset cuda --target espalier_cuda \
 && mkdir module \
 && cp "$(find build/cuda -name libespalier_cuda.so)" module/ \
 && strip --strip-debug module/libespalier_cuda.so \
 && cp -L "$(find /usr/local/cuda/ -name 'libcublasLt.so.13' | head -n 1)" module/

# The module looks for cuBLASLt beside itself.
FROM serve AS cuda
COPY --from=cuda-build /src/module/ /usr/lib/
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM serve
