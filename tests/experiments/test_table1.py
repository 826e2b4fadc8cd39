"""Table 1's parameter counts, as printed in the paper."""

from typer.testing import CliRunner

from quorem.cli import app
from quorem.experiments.paper_figures import table1_parameters

PRINTED = {
    "dcn": {16: 135_464_410, 32: 135_519_322, 64: 135_629_146, 128: 135_848_794},
    "dlrm": {16: 135_581_537, 32: 135_636_449, 64: 135_746_273, 128: 135_965_921},
}


def test_all_eight_parameter_counts():
    expected = {(network, hidden): count for network, row in PRINTED.items() for hidden, count in row.items()}
    assert table1_parameters() == expected


def test_command_prints_a_line_for_each_cell():
    run = CliRunner().invoke(app, ["reproduce", "table1", "--params-only"])
    expected = [f"{network},{hidden},{count}" for network, row in PRINTED.items() for hidden, count in row.items()]
    assert run.exit_code == 0, run.output
    assert run.stdout.splitlines() == expected
