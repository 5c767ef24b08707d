# Espalier on the CPU: docker build -t espalier . && docker run -p 8001:8001 -p 8002:8002 -v $PWD/models:/models:ro espalier
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

FROM debian:bookworm-slim
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
