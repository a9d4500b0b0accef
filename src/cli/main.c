/* cli/main.c: the table of commands, and the way from argv to an exit code. */
#include "cli.h"

#include <string.h>

const cli_command cli_commands[CLI_COMMAND_COUNT] = {
    [CLI_PLAN] = {"plan", "[MODEL] [options]", "what a run will hold, from the header alone",
                  "Prints every pool of memory that a run would take, the total against the budget "
                  "and,\nwhen it does not fit (exit 4), what would help. Reads the header only.",
                  cmd_plan},
    [CLI_RUN] =
        {"run", "[MODEL] [-p TEXT] [options]", "continue a text",
         "Writes the prompt and its continuation to stdout, everything else to stderr.\n"
         "Without a text it begins with the token that the model has for a beginning (BOS).\n"
         "Stops at the model's end token, after -n tokens, or when the context is full; with "
         "--endless\nafter -n tokens or at Ctrl-C.",
         cmd_run},
    [CLI_CHAT] = {"chat", "[MODEL] [options]", "talk with a model that has a chat format",
                  "Reads one question a line (/clear forgets, /quit or the end of the input "
                  "leaves).\nWith -p it answers that one question and ends.",
                  cmd_chat},
    [CLI_CHECK] = {"check", "[MODEL] [options]", "compare the plan with what really happened",
                   "Runs a prompt and -n tokens (256) and compares planned with taken memory, "
                   "counts\nallocations and page faults while decoding, and asks the system what "
                   "is resident.\nExit 5 when anything differs.",
                   cmd_check},
    [CLI_BENCH] = {"bench", "[MODEL] [options]", "measure speed against the machine's bandwidth",
                   "Tokens per second of prompts (pp) and of generation (tg), median of -r runs, "
                   "and the\nshare of the read bandwidth that was measured in the same run.",
                   cmd_bench},
    [CLI_PPL] = {"ppl", "[MODEL] -f FILE [options]", "perplexity of a text",
                 "Cuts the text into chunks of the context's length and scores the second half of "
                 "each\n(positions ctx/2 to ctx-2). --kl compares with the same model under f32 "
                 "keys and values,\n--kl-base with another engine's logits. With --endless the "
                 "text is one sequence, and the ring\nof -c positions wraps under it.",
                 cmd_ppl},
    [CLI_SCORE] = {"score", "[MODEL] -f FILE [options]", "log-probability of each token of a text",
                   "One line for each position from 1 on: the natural logarithm of the probability "
                   "of the\ntoken there, given all before it.",
                   cmd_score},
    [CLI_TOKENIZE] = {"tokenize", "[MODEL] -p TEXT [options]", "the token ids of a text",
                      "Prints the ids on one line. Works on files without tensors as well.",
                      cmd_tokenize},
    [CLI_INSPECT] = {"inspect", "[MODEL] [options]", "header keys and tensors of a file",
                     "Prints every key with its type, every tensor with its name, its id, format, "
                     "shape and place.",
                     cmd_inspect},
    [CLI_CALIBRATE] =
        {"calibrate", "[MODEL] [options]",
         "make the statistics that the KV formats r8 .. r3 use, and keep them",
         "Reads a built-in text once and keeps the statistics of the model's keys and "
         "queries in\nthe cache folder, under the fingerprint of the weights; prints "
         "where. Commands with -ctk r8\n.. r3 do it by themselves when it is missing.",
         cmd_calibrate},
    [CLI_KERNELS] = {"kernels", "[options]",
                     "the kernels of this build, and which of them serve here",
                     "Lists the kernels of this build, and which ones would be used.", cmd_kernels},
};

const cli_command *cli_command_find(const char *name)
{
    for (uint32_t i = 0; i < CLI_COMMAND_COUNT; i++) {
        if (strcmp(cli_commands[i].name, name) == 0)
            return &cli_commands[i];
    }
    return NULL;
}

/* help, --help, --version and their kin; *done says whether it was one of them. */
static rf_status answer_about_us(int argc, char **argv, bool *done, rf_error *err)
{
    const char *word = argv[1];
    *done = true;
    if (strcmp(word, "--version") == 0 || strcmp(word, "version") == 0) {
        out_print("ringfence %s\n", rf_version());
    } else if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        cli_help(NULL);
    } else if (strcmp(word, "help") == 0) {
        const cli_command *command = argc > 2 ? cli_command_find(argv[2]) : NULL;
        if (argc > 2 && !command)
            return rf_fail(err, RF_ERR_USAGE, argv[2], "unknown command; try: ringfence help");
        cli_help(command);
    } else {
        *done = false;
    }
    return RF_OK;
}

static rf_status dispatch(int argc, char **argv, rf_error *err)
{
    if (argc < 2)
        return rf_fail(err, RF_ERR_USAGE, "COMMAND", "missing; try: ringfence help");
    bool done;
    rf_status status = answer_about_us(argc, argv, &done, err);
    if (status || done)
        return status;
    const cli_command *command = cli_command_find(argv[1]);
    if (!command) {
        bool option = argv[1][0] == '-';
        return rf_fail(err, RF_ERR_USAGE, argv[1], "unknown %s; try: ringfence help",
                       option ? "option" : "command");
    }
    cli_args args;
    status = cli_options_parse(&args, command, argc - 2, argv + 2, err);
    if (status)
        return status;
    if (args.help) {
        cli_help(command);
        return RF_OK;
    }
    cli_output_init(args.quiet, args.json);
    return command->run(&args, err);
}

int main(int argc, char **argv)
{
    rf_error err = {0};
    cli_output_init(false, cli_json_wanted(argc, argv));
    signals_install();
    rf_status status = dispatch(argc, argv, &err);
    out_flush();
    if (out_failed() && status != RF_ERR_INTERRUPTED)
        status = out_status(&err);
    if (err.status == RF_ERR_INTERRUPTED && signals_interrupted())
        rf_fail(&err, RF_ERR_INTERRUPTED, "signal", "interrupted, everything is given back");
    if (err.status)
        cli_report(&err);
    return rf_status_exit_code(status);
}
