import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** mqadmin: each line has the words of a command, the answer has what the command printed to stdout and to stderr. */
final class Tools {
    static void run() throws Exception {
        PrintStream standard = System.out;                     // Harness has sent it to stderr
        PrintStream errors = System.err;
        for (String line; (line = Harness.STDIN.readLine()) != null; ) {
            JsonObject order = JsonParser.parseString(line).getAsJsonObject();
            List<String> words = new ArrayList<>();
            for (JsonElement word : order.getAsJsonArray("words")) {
                words.add(word.getAsString());
            }
            ByteArrayOutputStream printed = new ByteArrayOutputStream();
            ByteArrayOutputStream failed = new ByteArrayOutputStream();
            System.setOut(new PrintStream(printed, true, StandardCharsets.UTF_8));
            System.setErr(new PrintStream(failed, true, StandardCharsets.UTF_8));
            try {
                MQAdminStartup.main0(words.toArray(new String[0]), null);
            } finally {
                System.setOut(standard);
                System.setErr(errors);
            }
            errors.write(failed.toByteArray());
            Harness.emit(Harness.fields("event", "printed", "text", printed.toString(StandardCharsets.UTF_8),
                "errors", failed.toString(StandardCharsets.UTF_8)));
        }
    }
}
