"""Entry point of the issuer: `python -m etude.operator.issuer.main`."""

from etude.common.process import read_settings, run_service, start_process
from etude.operator.issuer.settings import Settings


def main() -> None:
    """Sign certificates until SIGTERM."""
    start_process()
    settings = read_settings("etude-issuer", Settings.from_env)
    from etude.operator.issuer.server import serve  # the API client arrives here

    run_service("etude-issuer", serve(settings))


if __name__ == "__main__":
    main()
