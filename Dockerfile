# docker build -t chunkattn .    (--build-arg EXTRAS=cuda or EXTRAS=tpu: with JAX for that accelerator)
# How to run it: docs/guides/serving.md, "Docker".

FROM python:3.12-slim AS build
ARG EXTRAS=""
WORKDIR /source
# The compiler is for the native attention of CPUs; it stays in this stage.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY chunkattn chunkattn
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/chunkattn \
    && set -- /wheels/*.whl \
    && /opt/chunkattn/bin/pip install --no-cache-dir "$1${EXTRAS:+[$EXTRAS]}"

# The same base, as the environment's python is a link into it.
FROM python:3.12-slim
COPY --from=build /opt/chunkattn /opt/chunkattn
# Checkpoints of the hub and compiled programs. Made before VOLUME, which keeps the owner.
RUN useradd --create-home --user-group --uid 1000 chunkattn && install -d -o chunkattn -g chunkattn /cache
ENV PATH=/opt/chunkattn/bin:$PATH XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME /cache
USER 1000
WORKDIR /home/chunkattn
EXPOSE 8000
# A first start may download a model, and compiles: /health answers 503 until it is done. The port in here stays 8000.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
    CMD ["python", "-c", \
    "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
# Whoever reaches the published port gets in: set CHUNKATTN_API_KEY.
ENTRYPOINT ["chunkattn"]
CMD ["serve", "--host", "0.0.0.0"]
