# Moesaic on CPU: docker build -t moesaic . && docker run --rm -v "$PWD:/work" moesaic prune tiny-moe out --keep 6
# Untried: nothing here could build containers.
FROM python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src
WORKDIR /work
ENTRYPOINT ["moesaic"]
