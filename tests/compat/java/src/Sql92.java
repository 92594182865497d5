import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.expression.MQFilterException;
import org.apache.rocketmq.filter.parser.SelectorParser;

/**
 * Says what the real filter module makes of SQL92 expressions. It needs no network, so it has a main of its own.
 *
 * A line of stdin is {"messages": [{name: text}]}, which are kept, or {"text": expression}. For an expression the line of
 * stdout is a character for each message: T, F, N (null), E (evaluating throws) or ? (something else); or "P" if it does
 * not parse.
 */
final class Sql92 {
    private static final class Message implements EvaluationContext {
        private final Map<String, Object> properties = new HashMap<>();

        @Override
        public Object get(String name) {
            return properties.get(name);
        }

        @Override
        public Map<String, Object> keyValues() {
            return properties;
        }
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream answers = new PrintStream(System.out, false, "UTF-8");
        List<Message> messages = new ArrayList<>();
        for (String line; (line = lines.readLine()) != null; ) {
            JsonObject request = JsonParser.parseString(line).getAsJsonObject();
            if (request.has("messages")) {
                messages = read(request);
            } else {
                answers.println(states(request.get("text").getAsString(), messages));
            }
        }
        answers.flush();
    }

    private static List<Message> read(JsonObject request) {
        List<Message> messages = new ArrayList<>();
        for (JsonElement one : request.getAsJsonArray("messages")) {
            Message message = new Message();
            for (Map.Entry<String, JsonElement> property : one.getAsJsonObject().entrySet()) {
                message.properties.put(property.getKey(), property.getValue().getAsString());
            }
            messages.add(message);
        }
        return messages;
    }

    private static String states(String text, List<Message> messages) {
        Expression expression;
        try {
            expression = SelectorParser.parse(text);
        } catch (MQFilterException e) {
            return "P";
        }
        StringBuilder states = new StringBuilder();
        for (Message message : messages) {
            try {
                Object state = expression.evaluate(message);
                states.append(state == null ? 'N' : state == Boolean.TRUE ? 'T' : state == Boolean.FALSE ? 'F' : '?');
            } catch (Exception e) {
                states.append('E');
            }
        }
        return states.toString();
    }
}
