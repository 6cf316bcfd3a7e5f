"""The patterns of the models in words: what a user is told to write."""

from collections.abc import Mapping

from etude.common.addresses import ENDPOINT, REGION
from etude.common.api import (
    autoscaling,
    gateway,
    lifecycle,
    network,
    observability,
    placement,
    pool,
    roles,
    scheduling,
)
from etude.common.api.meta import DECIMAL, NAME, OBJECT

WORDS: Mapping[str, str] = {
    NAME: "lower-case letters, digits and '-', beginning with a letter",
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "lower-case letters, digits and '-'",
    OBJECT: "the name of an object: lower-case letters, digits, '-' and '.'",
    scheduling.NODE_LABEL: "the key of a label, such as topology.kubernetes.io/zone",
    placement.KEY: "the key of a taint, such as nvidia.com/gpu",
    r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$": (
        "a label's value: letters, digits, '-', '_' and '.', a letter or digit at both ends"
    ),
    lifecycle.CONDITION: "the type of a pod's condition, such as DisruptionTarget",
    lifecycle.MANAGER: "a domain, a slash and a name, such as example.com/manager",
    roles.RESOURCE: "the name of an extended resource, such as nvidia.com/gpu",
    DECIMAL: 'a decimal in quotes, such as "0.5" or "3e-3"',
    r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$": 'a decimal in quotes, such as "-0.5" or "3e-3"',
    r"^(file|s3)://": "s3://bucket/prefix or file:///folder",
    pool.PREFIX: "s3://bucket/prefix or file:///folder, without spaces",
    pool.IMAGE: (
        "an image that was pushed, s3://bucket/prefix/ and 32 hexadecimal digits, a folder"
        " file:///…, or the name of one on the node"
    ),
    roles.IMAGE: "an image's reference, such as registry.example/etude:1.0",
    pool.BACKEND: "hashed-1, minilm-l6-v2, or trained- and 16 hexadecimal digits",
    observability.COLLECTOR: "an http:// or https:// URL, such as http://collector.example:4317",
    ENDPOINT: "scheme, host and port alone, such as http://127.0.0.1:9000",
    REGION: "letters, digits and hyphens, such as eu-central-1",
    network.HOST: "a host's name, such as pypi.org or *.example.com: addresses are refused",
    gateway.HOST: "a host's name in lower case, such as policy.example.com or *.example.com",
    network.PATH: "a path that begins with /, without spaces and %",
    network.HEADER: "the name of an HTTP header, such as Authorization",
    network.DATA_KEY: "a key of a Secret: letters, digits, '.', '_' and '-'",
    autoscaling.CRON: "five fields of cron, such as 0 8 * * 1-5: minute, hour, day, month, weekday",
    autoscaling.TIME_ZONE: "a time zone's name, such as Europe/Berlin",
    pool.CPU: 'a CPU quantity, such as "2" or 500m',
    r"^[0-9]+(Ki|Mi|Gi|Ti)?$": "a memory quantity, such as 512Mi or 4Gi",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "letters, digits and '_', beginning with no digit",
    r"^[0-9a-f]{64}$": "64 hexadecimal digits",
}
